"""Export files: the layout of an export folder, and the manifest that publishes the export.

    table/0000000000-<digest>-<export>.parquet          the complete dataset, in stretches of rows
    sidecars/<digest>-<export>/00042.labels.parquet     one per shard, to copy beside it
    shards/<digest>-<export>/00042.tar                  shards with repaired labels, on request
    manifest.json                                       replaced last: lists every file of the export
    unfinished.json                                     while an export writes: the ids of unfinished exports
    .lease                                              one export at a time writes here

`<export>` is the id of the export that wrote the file. A digest depends only on the labels, so labels that
have not changed are not written again. Excluded ids must not survive in older files, so an export removes the
files that only the previous manifest lists, and those of killed exports. It removes nothing else.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import LOCK, Folder
from pencil_scale.storage.urls import filesystem_of, is_local

KIND = "pencil_scale export"
FORMAT = 3
MANIFEST, UNFINISHED, LEASE = "manifest.json", "unfinished.json", ".lease"
FOLDERS = ("table", "sidecars", "shards")
_NAME = re.compile(r"((?:table|sidecars|shards)/[^/]+)-([0-9a-f]{16})(\.parquet|/[^/]+)")


class ExportError(PencilError):
    """An export folder that cannot be read, or is not ours."""


@dataclass(frozen=True)
class ExportManifest:
    """What an export contains, and what it was made from."""

    labels: str
    run: str  # id of the run that learned them
    catalogue_version: int
    model_version: str
    class_names: tuple[str, ...]
    num_samples: int
    num_label_issues: int
    table: tuple[str, ...]  # files, in the order of their rows
    sidecars: dict[str, str] = field(default_factory=dict)  # shard URL to file
    shards: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT
    kind: str = KIND

    def encode(self) -> bytes:
        """The JSON file that publishes the export."""
        return json.dumps(asdict(self), indent=1).encode()

    def files(self) -> set[str]:
        """Every file of the export."""
        return {*self.table, *self.sidecars.values(), *self.shards.values()}


def read_manifest(folder: str) -> ExportManifest | None:
    """Read the newest manifest; None if nothing has been exported yet."""
    found = _read(folder, MANIFEST)
    if found is None:
        return None
    return ExportManifest(**found | {name: tuple(found[name]) for name in ("table", "class_names")})


def _read(folder: str, name: str) -> dict[str, Any] | None:
    try:
        found = Folder(folder).read_json(name)
    except DamagedError as error:
        raise ExportError(f"{folder}/{name}: damaged; delete it and export again") from error
    if found is None:
        return None
    if isinstance(found, dict) and found.get("kind") == KIND and found.get("format") == FORMAT:
        return found
    raise ExportError(
        f"export.folder: {folder}/{name} is not part of an export of format {FORMAT}; choose another folder"
    )


def file_name(kind: str, content: str, rest: str, export: str) -> str:
    """Name a file by its kind, its content and the export that writes it."""
    return f"{kind}/{content}-{export}{rest}"


def same_content(file: str) -> str:
    """The name of a file without the export that wrote it: equal if the content is equal."""
    found = _NAME.fullmatch(file)
    return f"{found[1]}{found[3]}" if found else file


def first_row(file: str) -> int:
    """The first row in a file of the table, from its name."""
    return int(PurePosixPath(file).name[:10])


def begin(folder: str, export: str) -> ExportManifest | None:
    """Claim a folder for an export; return the manifest of the previous one, if any."""
    refuse_strangers(folder)
    before = read_manifest(folder)
    unfinished = {"kind": KIND, "format": FORMAT, "exports": [*_unfinished(folder), export]}
    Folder(folder).put_json(UNFINISHED, unfinished)
    return before


def tidy(folder: str, before: ExportManifest | None, kept: set[str]) -> list[str]:
    """Remove files of earlier exports that the new manifest does not list; return their names."""
    outdated, unfinished = set(before.files()) if before else set(), _unfinished(folder)
    if unfinished:
        found = ((name, _NAME.fullmatch(name)) for name in _files_in(folder))
        outdated |= {name for name, match in found if match and match[2] in unfinished}
    swept, store = sorted(outdated - kept), Folder(folder)
    for name in (*swept, UNFINISHED):
        store.delete(name)
    return swept


def remove_export(folder: str) -> bool:
    """Remove an export, and nothing else in its folder; return whether there was one."""
    before = read_manifest(folder)
    if before is None and not _unfinished(folder):
        return False
    Folder(folder).delete(MANIFEST)  # first, because every file it lists must exist
    tidy(folder, before, set())
    for name in (LEASE, LOCK):
        Folder(folder).delete(name)
    filesystem, root = filesystem_of(folder.rstrip("/"))
    if is_local(filesystem):
        ours = [path for part in FOLDERS for path in (Path(root, part), *Path(root, part).glob("*/"))]
        for path in sorted([Path(root), *ours], reverse=True):
            with suppress(OSError):  # it has other files, or is one
                path.rmdir()
    return True


def refuse_strangers(folder: str) -> None:
    """Refuse a folder with files that look like an export but were not written by one."""
    if read_manifest(folder) is not None or _unfinished(folder):
        return
    found = _files_in(folder)
    if found:
        part = found[0].partition("/")[0]
        raise ExportError(
            f"export.folder: {folder} has a folder '{part}' but no {MANIFEST} of an export, so it holds "
            "something else; nothing was written: choose an empty folder, or one that does not exist yet"
        )


def _unfinished(folder: str) -> list[str]:
    found = _read(folder, UNFINISHED)
    return [] if found is None else [str(export) for export in found["exports"]]


def _files_in(folder: str) -> list[str]:
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    paths = [path for part in FOLDERS for path in filesystem.find(f"{root}/{part}")]
    return [path[path.index(f"{root}/") + len(root) + 1 :] for path in paths]
