"""Manifests: a label table as it was at one moment, as content hashes over immutable files.

A part of the table is two files, named by the sha256 of their bytes under the id of the run that wrote them:
`parts/<run id>/<sha256>.arrow` has its labels, `ledger/<run id>/<sha256>.arrow` the epochs of the same rows.
They are written first, the manifest last, so what a manifest names is complete. A part that did not change is
named again, not written again.

    merge([manifest_of_rank_0, ...]).save("s3://lake/labels/published/night-12.json")
    manifest = Manifest.load("s3://lake/labels/published/night-12.json")
    swept = sweep_run("s3://lake", run_id)

A process killed before it saves a manifest leaves files that no manifest names, which `sweep_run` removes. A
run removes only files it wrote itself, under its own id, and only while it writes nothing: a file without a
manifest may belong to a run that is about to save one. Files that any manifest of the storage names stay: the
labels of another run may rest on parts of this one.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.part_files import LEDGER_SCHEMA, VERSION, Layout, labels_schema
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

KIND = "pencil_scale labels"
LABELS_FOLDER = "parts"
LEDGER_FOLDER = "ledger"
PARALLEL_PARTS = 4  # parts in flight to or from a store: hides its latency, bounds the memory at 4 parts

# Every place in a storage that may hold a manifest of labels: folder, how deep below it, and the file's name.
MANIFEST_PLACES: tuple[tuple[str, int | None, str], ...] = (
    ("labels/published", 1, ".json"),
    ("labels/held", 1, ".json"),
    ("runs", 2, "/labels.json"),
    ("nights", 2, "/carried.json"),
    ("checkpoints", None, "/labels.json"),
)


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
        found["layout"], found["class_names"] = Layout(**found["layout"]), tuple(found["class_names"])
        found["parts"] = {
            int(part): StoredPart(*(StoredFile(*fields) for fields in files))
            for part, files in found["parts"].items()
        }
        return cls(**found)

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
        if replace(other, parts=first.parts, newest_epoch=first.newest_epoch) != first:
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


def file_name(folder: str, file: StoredFile) -> str:
    """The name of a file in its store."""
    return f"{folder}/{file.run}/{file.sha256}.arrow"


def put_batch(store: Folder, folder: str, batch: pa.RecordBatch, run: str) -> StoredFile:
    """Write labels or a ledger under the run's id and the hash of their content, unless stored already."""
    # A ledger is mostly runs of one number and compresses to almost nothing; logits do not compress at all.
    options = pa.ipc.IpcWriteOptions(compression="zstd" if folder == LEDGER_FOLDER else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.remove_metadata(), options=options) as writer:
        writer.write_batch(batch.replace_schema_metadata(None))
    data = memoryview(sink.getvalue())
    file = StoredFile(hashlib.sha256(data).hexdigest(), data.nbytes, run)
    if not store.holds(file_name(folder, file), file.num_bytes):
        store.put(file_name(folder, file), data)
    return file


def get_part(manifest: Manifest, store: Folder, part: int, folder: str) -> pa.RecordBatch:
    """Read the labels or the ledger of a part, and refuse bytes that are not those the manifest names."""
    labels, expected = folder == LABELS_FOLDER, len(manifest.layout.rows_of(part))
    file = manifest.parts[part].labels if labels else manifest.parts[part].ledger
    name = file_name(folder, file)
    data = store.get(name)
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise DamagedError(
            f"{store.path(name)}: damaged: {len(data):,} bytes with sha256 {found[:12]}, the manifest names "
            f"{file.num_bytes:,} bytes with {file.sha256[:12]}; fetch it again, or restore another manifest"
        )
    reader = pa.ipc.open_file(pa.py_buffer(data))
    if not reader.schema.equals(labels_schema(manifest.layout.num_classes) if labels else LEDGER_SCHEMA):
        raise PencilError(f"{store.path(name)}: its columns do not match the manifest's class count")
    batch = reader.get_batch(0)
    if batch.num_rows != expected:
        raise DamagedError(
            f"manifest over {manifest.store}: the file of part {part} has {batch.num_rows:,} rows, "
            f"expected {expected:,}; restore another manifest"
        )
    return batch


def get_parts(manifest: Manifest, parts: Iterable[int], folder: str) -> Iterator[pa.RecordBatch]:
    """Read the labels or the ledgers of parts in order, a few parts ahead."""
    store = Folder(manifest.store)
    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        coming: deque[Future[pa.RecordBatch]] = deque()
        for part in parts:
            coming.append(pool.submit(get_part, manifest, store, part, folder))
            if len(coming) == PARALLEL_PARTS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def visited(manifest: Manifest, epoch: int) -> npt.NDArray[np.bool_]:
    """Which rows the present run visited in its `epoch`: what a plan leaves out after a crash."""
    manifest.require_whole()
    seen = np.zeros(manifest.layout.num_rows, np.bool_)
    parts = range(manifest.layout.num_parts)
    for part, batch in zip(parts, get_parts(manifest, parts, LEDGER_FOLDER), strict=True):
        rows, last_epoch = manifest.layout.rows_of(part), batch.column("last_epoch").to_numpy()
        seen[rows.start : rows.stop] = last_epoch == manifest.first_epoch + epoch
    return seen


def sweep_run(storage: str, run: str) -> list[str]:
    """Remove the label files of a run that no manifest in the storage names; return their names."""
    files = Storage(storage)
    return remove_unnamed(files.path(files.labels), run, manifests_of(storage))


def remove_unnamed(store: str | Path, run: str, kept: Iterable[Manifest]) -> list[str]:
    """Remove the files that one run wrote and none of these manifests names; return their names."""
    files, named = Folder(store), set[str]()
    for part in (part for manifest in kept for part in manifest.parts.values()):
        named |= {file_name(LABELS_FOLDER, part.labels), file_name(LEDGER_FOLDER, part.ledger)}
    written = [name for folder in (LABELS_FOLDER, LEDGER_FOLDER) for name in files.names(f"{folder}/{run}")]
    swept = [name for name in written if name not in named]
    for name in swept:
        files.delete(name)
    return swept


def manifests_of(storage: str) -> list[Manifest]:
    """Read every manifest of labels in a storage: published, held, of runs, of nights, of checkpoints."""
    filesystem, root = filesystem_of(storage.rstrip("/"))
    filesystem.invalidate_cache()
    places = ((filesystem.find(f"{root}/{folder}", depth), end) for folder, depth, end in MANIFEST_PLACES)
    manifests = []
    for path in (path for paths, end in places for path in paths if path.endswith(end)):
        data = filesystem.cat_file(path)
        try:
            found = json.loads(data)
        except ValueError as error:  # it may have been a manifest: what it named is not known
            raise PencilError(
                f"{path}: damaged JSON ({error}); nothing is swept until it is removed"
            ) from None
        if isinstance(found, dict) and found.get("kind") == KIND:
            manifests.append(Manifest.decode(data, path))
    return manifests
