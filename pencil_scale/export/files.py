"""Export files: how an export is stored in its folder, and the manifest that publishes it.

    table/0000000000-<digest>-<export>.parquet          the whole dataset, in stretches of rows
    sidecars/<digest>-<export>/00042.labels.parquet     one for each shard, beside which it may be copied
    shards/<digest>-<export>/00042.tar                  shards with repaired labels, on request
    manifest.json                                       replaced last: names every file that counts
    unfinished.json                                     while an export writes: the ids of exports under way
    .lease                                              one export at a time writes here

`<export>` is the id of the export that wrote the file. A digest is of the labels alone, so labels that did
not change are not written again. Ids that were taken down must not survive in an older file, so an export
removes what the manifest before it named, and what a killed export wrote under its id. Nothing else in the
folder is ever removed.
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
FORMAT = 2
MANIFEST, UNFINISHED, LEASE = "manifest.json", "unfinished.json", ".lease"
FOLDERS = ("table", "sidecars", "shards")
_NAME = re.compile(r"((?:table|sidecars|shards)/[^/]+)-([0-9a-f]{16})(\.parquet|/[^/]+)")


class ExportError(PencilError):
    """An export that cannot be made or read."""


@dataclass(frozen=True)
class ExportManifest:
    """What an export says of itself."""

    labels: str
    run: str  # id of the run that learned them
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

    def encode(self) -> bytes:
        """As the JSON file that publishes the export."""
        return json.dumps(asdict(self), indent=1).encode()

    def files(self) -> set[str]:
        """Every file that counts."""
        return {*self.table, *self.sidecars.values(), *self.shards.values()}


def read_manifest(folder: str) -> ExportManifest | None:
    """Read the newest manifest; None where nothing was exported yet."""
    try:
        found: Any = json.loads(Folder(folder).get(MANIFEST))
    except DamagedError:
        return None
    except ValueError as error:
        raise ExportError(f"{folder}/{MANIFEST}: damaged ({error}); delete it and export again") from error
    if not isinstance(found, dict) or found.get("kind") != KIND or found.get("format") != FORMAT:
        raise ExportError(
            f"{folder}: {MANIFEST} is no export of format {FORMAT}; choose another export.folder"
        )
    found["table"], found["class_names"] = tuple(found["table"]), tuple(found["class_names"])
    return ExportManifest(**found)


def file_name(kind: str, content: str, rest: str, export: str) -> str:
    """Name a file by its kind, its content and the export that writes it."""
    return f"{kind}/{content}-{export}{rest}"


def same_content(file: str) -> str:
    """The name of a file without the export that wrote it: equal where the content is."""
    found = _NAME.fullmatch(file)
    return f"{found[1]}{found[3]}" if found else file


def written_by(file: str) -> str | None:
    """The id of the export that wrote a file; None if it is none of ours."""
    found = _NAME.fullmatch(file)
    return found[2] if found else None


def first_row(file: str) -> int:
    """The first row of a file of the table over all, from its name."""
    return int(PurePosixPath(file).name[:10])


def begin(folder: str, export: str) -> ExportManifest | None:
    """Claim a folder for an export; return the manifest of the one before, None where there was none."""
    refuse_strangers(folder)
    before = read_manifest(folder)
    _mark_unfinished(folder, [*_unfinished(folder), export])
    return before


def tidy(folder: str, before: ExportManifest | None, kept: set[str]) -> list[str]:
    """Remove what earlier exports wrote here and the new manifest does not name; return the names."""
    store = Folder(folder)
    named = set(before.files()) if before else set()
    for export in _unfinished(folder):
        named |= {name for name in _files_in(folder) if written_by(name) == export}
    swept = sorted(named - kept)
    for name in swept:
        store.delete_if_there(name)
    _mark_unfinished(folder, [])
    return swept


def remove_export(folder: str) -> bool:
    """Remove an export, and nothing else that may be in its folder; return whether there was one."""
    before = read_manifest(folder)
    if before is None and not _unfinished(folder):
        return False
    Folder(folder).delete_if_there(MANIFEST)  # first, for what it names must be there
    tidy(folder, before, set())
    for name in (LEASE, LOCK):
        Folder(folder).delete_if_there(name)
    _remove_empty_folders(folder)
    return True


def _remove_empty_folders(folder: str) -> None:
    filesystem, root = filesystem_of(folder.rstrip("/"))
    if is_local(filesystem):
        ours = [path for part in FOLDERS for path in (Path(root, part), *Path(root, part).glob("*/"))]
        for path in sorted([Path(root), *ours], reverse=True):
            with suppress(OSError):  # it holds somebody else's files, or is one
                path.rmdir()


def refuse_strangers(folder: str) -> None:
    """Refuse a folder that holds what could be taken for an export, and is none of ours."""
    if read_manifest(folder) is not None or _unfinished(folder):
        return
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    for part in FOLDERS:
        if filesystem.find(f"{root}/{part}"):
            raise ExportError(
                f"export.folder: {folder} holds a folder '{part}' and no {MANIFEST} of an export, so it is "
                "somebody else's; nothing was written: choose an empty folder, or one that does not exist yet"
            )


def _unfinished(folder: str) -> list[str]:
    try:
        found: Any = json.loads(Folder(folder).get(UNFINISHED))
        if found["kind"] != KIND:
            raise ValueError(f"kind {found['kind']!r}")
        return [str(export) for export in found["exports"]]
    except DamagedError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{folder}/{UNFINISHED}: not ours, or damaged ({error}); choose another export.folder"
        ) from error


def _mark_unfinished(folder: str, exports: list[str]) -> None:
    store = Folder(folder)
    if exports:
        store.put(UNFINISHED, json.dumps({"kind": KIND, "exports": exports}).encode())
    else:
        store.delete_if_there(UNFINISHED)


def _files_in(folder: str) -> list[str]:
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    paths = [path for part in FOLDERS for path in filesystem.find(f"{root}/{part}")]
    return [path[path.index(f"{root}/") + len(root) + 1 :] for path in paths]
