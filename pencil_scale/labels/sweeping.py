"""Sweeping: label parts of a storage that nothing names any more are found and removed.

A part is written before the manifest that names it, so a part without a manifest may be waste, or may belong
to a run that is just writing. Whoever works on the storage alone may remove it at once. Others leave alone
what is younger than two days; and no writer relies on a part that lay there for more than a day, but writes
it again (`PartStore.holds`), so what it relies on is never old enough to go.

    swept = sweep_storage("s3://lake/clothing1m", alone=False)
"""

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from pencil_scale.labels.manifest import KIND, Manifest
from pencil_scale.labels.part_files import LabelTableError
from pencil_scale.labels.part_store import RELIED_ON_S
from pencil_scale.labels.snapshot import LABELS_FOLDER, LEDGER_FOLDER, sweep
from pencil_scale.labels.start_labels import label_store
from pencil_scale.reading.byte_source import filesystem_of

GRACE_S = 2 * RELIED_ON_S
# Folders that hold many files, and no manifest of labels.
ELSEWHERE = {"catalogue", "exports", "models", "subsets", "history", "pins", "outbox"}
ELSEWHERE |= {LABELS_FOLDER, LEDGER_FOLDER}


def sweep_storage(storage: str, alone: bool) -> list[str]:
    """Remove the label parts that no manifest anywhere in the storage names; say which.

    Manifests of published labels, of labels that runs and nights began with, and of every checkpoint count.
    """
    return sweep(label_store(storage), manifests_of(storage), min_age_s=0.0 if alone else GRACE_S)


def manifests_of(storage: str) -> list[Manifest]:
    """Read every manifest of labels in a storage, wherever it lies."""
    filesystem, root = filesystem_of(storage)
    filesystem.invalidate_cache()
    found = ((path, filesystem.cat_file(path)) for path in _json_files(filesystem, root))
    return [Manifest.decode(data, path) for path, data in found if _is_manifest(path, data)]


def _json_files(filesystem: Any, folder: str) -> Iterator[str]:
    for entry in filesystem.ls(folder, detail=True):
        path = PurePosixPath(entry["name"])
        if entry["type"] == "directory" and path.name not in ELSEWHERE:
            yield from _json_files(filesystem, entry["name"])
        elif entry["type"] == "file" and path.suffix == ".json":
            yield entry["name"]


def _is_manifest(path: str, data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError as error:  # it may have been a manifest: what it named is not known
        raise LabelTableError(
            f"{path}: not a whole JSON file ({error}); nothing is swept until it is gone"
        ) from None
    return isinstance(found, dict) and found.get("kind") == KIND
