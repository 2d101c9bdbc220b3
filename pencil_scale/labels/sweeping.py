"""Sweeping: label parts that a run wrote and that nothing names any more are found and removed.

A run removes only what it wrote itself, under its own id, and only while it writes nothing: a part is written
before the manifest that names it, so a part without a manifest may belong to a run that is just writing. What
every manifest of the storage names stays: labels of another run may rest on parts of this one.

    swept = sweep_run("s3://lake/clothing1m", run_id)
"""

import json
from collections.abc import Iterator
from typing import Any

from pencil_scale.labels.manifest import KIND, Manifest
from pencil_scale.labels.part_files import LabelTableError
from pencil_scale.labels.snapshot import sweep
from pencil_scale.labels.start_labels import label_store
from pencil_scale.reading.byte_source import filesystem_of

# Every place in a storage that may hold a manifest of labels: folder, how deep below it, and the file's name.
PLACES: tuple[tuple[str, int | None, str], ...] = (
    ("labels/published", 1, ".json"),
    ("labels/held", 1, ".json"),
    ("runs", 2, "/labels.json"),
    ("nights", 2, "/carried.json"),
    ("checkpoints", None, "/labels.json"),
)


def sweep_run(storage: str, run: str) -> list[str]:
    """Remove the label parts of a run that no manifest in the storage names; return their names."""
    return sweep(label_store(storage), run, manifests_of(storage))


def manifests_of(storage: str) -> list[Manifest]:
    """Read every manifest of labels in a storage: published, held, of runs, of nights, of checkpoints."""
    filesystem, root = filesystem_of(storage.rstrip("/"))
    filesystem.invalidate_cache()
    found = ((path, filesystem.cat_file(path)) for path in _paths(filesystem, root))
    return [Manifest.decode(data, path) for path, data in found if _is_manifest(path, data)]


def _paths(filesystem: Any, root: str) -> Iterator[str]:
    for folder, depth, name in PLACES:
        yield from (path for path in filesystem.find(f"{root}/{folder}", depth) if path.endswith(name))


def _is_manifest(path: str, data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError as error:  # it may have been a manifest: what it named is not known
        raise LabelTableError(
            f"{path}: not an intact JSON file ({error}); nothing is swept until it is gone"
        ) from None
    return isinstance(found, dict) and found.get("kind") == KIND
