"""Export files: how an export lies in its folder, and the manifest that publishes it.

    table/00000-<digest>.parquet               the whole dataset, in stretches of rows
    sidecars/<digest>/00042.labels.parquet     one for each shard, beside which it may be copied
    shards/<digest>/00042.tar                  shards with repaired labels, on request
    manifest.json                              replaced last: names every file that counts

A digest is of the labels alone, so labels that did not change are not written again. What the newest manifest
does not name is removed after it stands: ids that were taken down must not survive in an older file.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.reading.byte_source import filesystem_of
from pencil_scale.schema import PencilError

KIND = "pencil_scale export"
FORMAT = 1
MANIFEST = "manifest.json"
FOLDERS = ("table", "sidecars", "shards")


class ExportError(PencilError):
    """An export that cannot be made or read."""


@dataclass(frozen=True)
class ExportManifest:
    """What an export says of itself."""

    labels: str
    catalogue_version: int
    model_version: str
    class_names: tuple[str, ...]
    num_samples: int
    num_label_issues: int
    table: tuple[str, ...]  # files, in rows' order
    sidecars: dict[str, str] = field(default_factory=dict)  # shard URL to file
    shards: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT
    kind: str = KIND

    def files(self) -> set[str]:
        """Every file that counts."""
        return {*self.table, *self.sidecars.values(), *self.shards.values()}


def read_manifest(folder: str) -> ExportManifest | None:
    """Read the newest manifest; None where nothing was exported yet."""
    try:
        found: Any = json.loads(PartStore(folder).get(MANIFEST))
    except TableDamagedError:
        return None
    except ValueError as error:
        raise ExportError(f"{folder}/{MANIFEST}: damaged ({error}); delete it and export again") from error
    if not isinstance(found, dict) or found.get("kind") != KIND or found.get("format") != FORMAT:
        raise ExportError(
            f"{folder}: {MANIFEST} is no export of format {FORMAT}; choose another export.folder"
        )
    found["table"], found["class_names"] = tuple(found["table"]), tuple(found["class_names"])
    return ExportManifest(**found)


def publish(folder: str, manifest: ExportManifest) -> None:
    """Put the manifest in its place."""
    PartStore(folder).put(MANIFEST, json.dumps(asdict(manifest), indent=1).encode())


def sweep(folder: str, kept: Iterable[str]) -> list[str]:
    """Remove every file of the export that is not to be kept; gives their names."""
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    wanted = set(kept)
    swept = []
    for part in FOLDERS:
        for path in filesystem.find(f"{root}/{part}"):
            name = path[path.index(f"{root}/{part}/") + len(root) + 1 :]
            if name not in wanted:
                filesystem.rm_file(path)
                swept.append(name)
    return swept
