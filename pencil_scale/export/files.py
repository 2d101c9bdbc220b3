"""Export files: the layout of an export folder, and the manifest that publishes the export.

    table/0000000000-<digest>-<export>.parquet          the complete dataset, in stretches of rows
    doubts/<digest>-<export>.parquet                    the labels most likely wrong as given, changed or kept
    sidecars/<digest>-<export>/00042.labels.parquet     one per shard, to copy beside it
    shards/<digest>-<export>/00042.tar                  shards with repaired labels, on request
    manifest.json                                       replaced last: lists every file of the export
    .lease                                              one export at a time writes here

`<export>` is the id of the export that wrote the file. A digest depends only on the labels, so labels that
have not changed are not written again. Excluded ids must not survive in older files, so an export removes the
files of earlier exports, finished or killed, that its manifest does not list. It removes nothing else.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from pencil_scale.method.calibration import Calibration
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import LOCK, Folder
from pencil_scale.storage.urls import filesystem_of, is_local

KIND = "pencil_scale export"
FORMAT = 5
MANIFEST, LEASE = "manifest.json", ".lease"
FOLDERS = ("table", "doubts", "sidecars", "shards")
_NAME = re.compile(
    r"((?:table|doubts|sidecars|shards)/[^/]*[0-9a-f]{16})-[0-9a-f]{16}(\.parquet[^/]*|/[^/]+)"
)


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
    doubts: str = ""
    sidecars: dict[str, str] = field(default_factory=dict)  # shard URL to file
    shards: dict[str, str] = field(default_factory=dict)
    held_because: tuple[str, ...] = ()  # of labels that were held and exported with --force
    calibration: Calibration | None = None  # how probabilities are recalibrated
    format: int = FORMAT
    kind: str = KIND

    def encode(self) -> bytes:
        """The JSON file that publishes the export."""
        return json.dumps(asdict(self), indent=1).encode()

    def files(self) -> set[str]:
        """Every file of the export."""
        return {*self.table, *filter(None, [self.doubts]), *self.sidecars.values(), *self.shards.values()}


def read_manifest(folder: str) -> ExportManifest | None:
    """Read the newest manifest; None if nothing has been exported yet."""
    found = Folder(folder).read_json(MANIFEST)
    if found is None:
        return None
    if not isinstance(found, dict) or (found.get("kind"), found.get("format")) != (KIND, FORMAT):
        raise PencilError(
            f"export.folder: {folder}/{MANIFEST} is not an export of format {FORMAT}; choose another folder"
        )
    known = found["calibration"]
    tuples = {name: tuple(found[name]) for name in ("table", "class_names", "held_because")}
    return ExportManifest(**found | tuples | {"calibration": Calibration(**known) if known else None})


def same_content(file: str) -> str:
    """The name of a file without the export that wrote it: equal if the content is equal."""
    found = _NAME.fullmatch(file)
    return f"{found[1]}{found[2]}" if found else file


def first_row(file: str) -> int:
    """The first row in a file of the table, from its name."""
    return int(PurePosixPath(file).name[:10])


def exported_files(folder: str) -> set[str]:
    """List the files that exports wrote to a folder, also those of killed exports."""
    return {name for name in _files_in(folder) if _NAME.fullmatch(name)}


def refuse_strangers(folder: str) -> None:
    """Refuse a folder with files that look like an export but were not written by one."""
    if read_manifest(folder) is not None:
        return
    strangers = [name for name in _files_in(folder) if not _NAME.fullmatch(name)]
    if strangers:
        raise PencilError(
            f"export.folder: {folder} has a folder '{strangers[0].partition('/')[0]}' but no {MANIFEST} of "
            "an export, so it holds something else; nothing was written: choose an empty folder, or one that "
            "does not exist yet"
        )


def _files_in(folder: str) -> list[str]:
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    paths = [path for kind in FOLDERS for path in filesystem.find(f"{root}/{kind}")]
    return [path[path.index(f"{root}/") + len(root) + 1 :] for path in paths]


def remove_export(folder: str) -> bool:
    """Remove an export, and nothing else in its folder; return whether there was one."""
    found = exported_files(folder)
    if read_manifest(folder) is None and not found:
        return False
    # The manifest goes first, because every file it lists must exist.
    for name in (MANIFEST, *found, LEASE, LOCK):
        Folder(folder).delete(name)
    filesystem, root = filesystem_of(folder.rstrip("/"))
    if is_local(filesystem):
        kinds = [Path(root, kind) for kind in FOLDERS]
        for path in (*(path for kind in kinds for path in kind.glob("*/")), *kinds, Path(root)):
            with suppress(OSError):  # it has other files, or is one
                path.rmdir()
    return True
