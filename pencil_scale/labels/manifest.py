"""Manifests: a label table as it was at one moment, as content hashes over immutable files.

A part of the table is one or more pieces, files named by the sha256 of their bytes under the id of the run
that wrote them: labels are in `parts/<run id>/<sha256>.arrow`, the epochs of the same rows in
`ledger/<run id>/<sha256>.arrow`. Pieces are written first, the manifest last, so what a manifest names is
complete. A part that did not change is named again, not written again; a part that gained rows, or two parts
joined when the table doubles its part size, are named as several pieces.

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
class Piece:
    """One immutable file: some consecutive rows of a part."""

    sha256: str
    num_bytes: int
    num_rows: int
    run: str  # id of the run that wrote it, and alone may remove it


@dataclass(frozen=True)
class PartEntry:
    """The pieces of one part, in row order: its labels, and its ledger."""

    labels: tuple[Piece, ...]
    ledger: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """A table as it was at one moment; partial when its writer held only some of the parts."""

    store: str
    layout: Layout
    scale: float
    first_epoch: int  # the epoch of the table's life that the present run calls 0
    newest_epoch: int  # the newest epoch any row bears; 0 before the first
    class_names: tuple[str, ...]  # what the class numbers stand for
    run: str  # id of the run whose labels these are; what it writes goes under this id
    parts: Mapping[int, PartEntry]
    attempt: int = 0  # which start of the run wrote it; 0: none, the run had not started to train
    catalogue: str = ""  # id of the catalogue whose rows these are

    def save(self, url: str | Path) -> None:
        """Write the manifest, whole or not at all; only call this once the parts of every rank are in."""
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
        """As JSON, for a file of its own or inside a checkpoint."""
        head = {"kind": KIND, "version": VERSION, "store": self.store, "layout": vars(self.layout)}
        head |= {"scale": self.scale, "first_epoch": self.first_epoch, "newest_epoch": self.newest_epoch}
        head |= {"run": self.run, "attempt": self.attempt, "class_names": self.class_names}
        head |= {"catalogue": self.catalogue}
        parts = {part: _encode_entry(entry) for part, entry in sorted(self.parts.items())}
        return json.dumps(head | {"parts": parts}).encode()

    @classmethod
    def decode(cls, data: bytes, name: str = "manifest") -> "Manifest":
        """Read the JSON back; `name` is what errors call it."""
        found = _parse(data, name)
        parts = {int(part): _decode_entry(entry) for part, entry in found["parts"].items()}
        layout = Layout(**found["layout"])
        epochs = found["first_epoch"], found["newest_epoch"]
        names, run = tuple(found["class_names"]), found["run"]
        identity = found["attempt"], found["catalogue"]
        return cls(found["store"], layout, found["scale"], *epochs, names, run, parts, *identity)

    def for_new_run(self, run: str) -> "Manifest":
        """The same labels for a run that counts its own epochs from 0: no row bears any of them yet."""
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


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{name}: not a whole manifest ({error}); use the one before it") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise PencilError(f"{name}: JSON, but not a manifest of labels; check the address")
    if found["version"] != VERSION:
        raise PencilError(
            f"{name}: a manifest of version {found['version']}; this program reads version {VERSION}: "
            "use the program that wrote it"
        )
    return found


def _encode_entry(entry: PartEntry) -> dict[str, list[list[Any]]]:
    return {kind: [list(vars(piece).values()) for piece in pieces] for kind, pieces in vars(entry).items()}


def _decode_entry(entry: dict[str, list[list[Any]]]) -> PartEntry:
    labels, ledger = (tuple(Piece(*fields) for fields in entry[kind]) for kind in ("labels", "ledger"))
    return PartEntry(labels, ledger)


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
