"""Manifests: a label table as it was at one moment, as content hashes over immutable files.

A part of the table is two files, named by the sha256 of their bytes under the id of the run that wrote them:
`parts/<run id>/<sha256>.arrow` has its labels, `ledger/<run id>/<sha256>.arrow` the epochs of the same rows.
They are written first, the manifest last, so what a manifest names is complete. A part that did not change is
named again, not written again.

    merge([manifest_of_rank_0, ...]).save("s3://lake/labels/published/night-12.json")
    manifest = Manifest.load("s3://lake/labels/published/night-12.json")
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pencil_scale.labels.part_files import VERSION, Layout
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder

KIND = "pencil_scale labels"


@dataclass(frozen=True)
class StoredFile:
    """One immutable file."""

    sha256: str
    num_bytes: int
    run: str  # id of the run that wrote it; only that run may remove it


@dataclass(frozen=True)
class StoredPart:
    """The two files of one part."""

    labels: StoredFile
    ledger: StoredFile


@dataclass(frozen=True)
class Manifest:
    """A table as it was at one moment; partial when its writer held only some of the parts."""

    store: str
    layout: Layout
    scale: float
    first_epoch: int  # the epoch of the table's life that the present run calls 0
    newest_epoch: int  # the newest epoch of any row; 0 before the first
    class_names: tuple[str, ...]  # the names of the class numbers
    run: str  # id of the run whose labels these are; what it writes goes under this id
    parts: Mapping[int, StoredPart]
    attempt: int = 0  # which start of the run wrote it; 0: the run had not started to train
    catalogue: str = ""  # id of the catalogue whose rows these are

    def save(self, url: str | Path) -> None:
        """Write the manifest, completely or not at all; only once the parts of every rank are stored."""
        self.require_whole()
        folder, name = _split(url)
        Folder(folder).put(name, self.encode())

    @classmethod
    def load(cls, url: str | Path, store: str | Path | None = None) -> "Manifest":
        """Read a manifest; `store` says where its parts are, if they were moved since."""
        folder, name = _split(url)
        manifest = cls.decode(Folder(folder).get(name), str(url))
        return manifest if store is None else replace(manifest, store=Folder(store).url)

    @classmethod
    def find(cls, url: str | Path) -> "Manifest | None":
        """Read a manifest; None if there is none."""
        folder, name = _split(url)
        data = Folder(folder).find(name)
        return None if data is None else cls.decode(data, str(url))

    def encode(self) -> bytes:
        """As JSON, for a file or for a checkpoint."""
        parts = {
            part: [list(vars(file).values()) for file in (stored.labels, stored.ledger)]
            for part, stored in sorted(self.parts.items())
        }
        changed = {"kind": KIND, "version": VERSION, "layout": vars(self.layout), "parts": parts}
        return json.dumps(vars(self) | changed).encode()

    @classmethod
    def decode(cls, data: bytes, name: str = "manifest") -> "Manifest":
        """Read the JSON back; errors call it `name`."""
        try:
            found = json.loads(data)
        except ValueError as error:
            raise DamagedError(f"{name}: damaged manifest ({error}); use the one before it") from error
        if not isinstance(found, dict) or found.pop("kind", None) != KIND:
            raise PencilError(f"{name}: JSON, but not a manifest of labels; check the address")
        version = found.pop("version")
        if version != VERSION:
            raise PencilError(
                f"{name}: a manifest of version {version}; this program reads version {VERSION}: "
                "use the program that wrote it"
            )
        decoded: dict[str, Any] = {
            "layout": Layout(**found["layout"]),
            "class_names": tuple(found["class_names"]),
            "parts": {
                int(part): StoredPart(*(StoredFile(*fields) for fields in files))
                for part, files in found["parts"].items()
            },
        }
        return cls(**found | decoded)

    def for_new_run(self, run: str) -> "Manifest":
        """The same labels for a run that counts its own epochs from 0, none of which any row has yet."""
        return replace(self, first_epoch=self.newest_epoch + 1, run=run, attempt=0)

    def require_whole(self) -> None:
        """Refuse a manifest that lacks parts."""
        missing = [part for part in range(self.layout.num_parts) if part not in self.parts]
        if missing:
            raise PencilError(
                f"manifest over {self.store}: {len(missing)} of {self.layout.num_parts} parts are missing, "
                f"the first is part {missing[0]}; merge the manifests of all ranks"
            )


def _split(url: str | Path) -> tuple[str, str]:
    name = PurePosixPath(str(url)).name
    return str(url)[: -len(name)] or ".", name


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """Join the partial manifests that the ranks wrote at the same moment into one over all parts."""
    first, *others = manifests
    for other in others:
        same = replace(other, parts=first.parts, newest_epoch=first.newest_epoch)
        if same != first:
            raise PencilError(
                f"manifests disagree: {_shape(first)} and {_shape(other)}; merge what one run wrote at once"
            )
        both = first.parts.keys() & other.parts.keys()
        if both:
            raise PencilError(f"two manifests name part {min(both)}; a part has one owner")
        newest = max(first.newest_epoch, other.newest_epoch)
        first = replace(first, parts={**first.parts, **other.parts}, newest_epoch=newest)
    first.require_whole()
    return first


def _shape(manifest: Manifest) -> str:
    layout = manifest.layout
    shape = f"{layout.num_rows:,} rows, {layout.num_classes} classes, parts of {layout.part_rows:,}"
    return f"{manifest.store} ({shape}, first epoch {manifest.first_epoch})"
