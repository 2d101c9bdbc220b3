"""Manifests: a label table as it was at one moment, as content hashes over immutable files.

A part of the table is two files, named by the sha256 of their bytes under the id of the run that wrote them:
`parts/<run id>/<sha256>.arrow` has its labels, `ledger/<run id>/<sha256>.arrow` the epochs and predictions of
the same rows.
They are written first, the manifest last, so what a manifest names is complete. A part that did not change is
named again, not written again.

    merge([manifest_of_rank_0, ...]).save("s3://lake/labels/published/night-0012.json")
    manifest = Manifest.load("s3://lake/labels/published/night-0012.json")
    swept = sweep_run("s3://lake", run_id)

A process killed before it saves a manifest leaves files that no manifest names, and so does a checkpoint that
is removed. They are removed before every snapshot and at the end of a run. A run removes only files it wrote
itself, under its own id, and only while it writes nothing: a file without a manifest may belong to a run that
is about to save one. Files that any manifest of the storage names stay: the
labels of another run may rest on parts of this one.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.columns import Layout, labels_schema, ledger_schema
from pencil_scale.storage.errors import DamagedError, PencilError, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

Result = TypeVar("Result")

KIND = "pencil_scale labels"
VERSION = 7
LABELS, LEDGER = "parts", "ledger"  # the folders of a store
FOLD = "-fold-"  # between the id of a run and the number of a further training
READS = 3  # of a file whose bytes are not those that a manifest names
PARALLEL_PARTS = 4  # parts in flight to or from a store: hides its latency, bounds the memory at 4 parts

# Where a storage may have manifests of labels: folder, how deep below it, and how the name of the file ends.
BESIDE_CHECKPOINTS: tuple[tuple[str, int | None, str], ...] = (
    ("labels/published", 1, ".json"),
    ("labels/held", 1, ".json"),
    ("runs", 2, "labels.json"),  # also fold-1-labels.json
    ("nights", 2, "/carried.json"),
)
IN_CHECKPOINTS = "/labels.json"
MANIFEST_FOLDERS = (*BESIDE_CHECKPOINTS, ("checkpoints", None, IN_CHECKPOINTS))


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
    scale: float  # K: a row starts, and is pinned, at K * one-hot
    first_epoch: int  # the epoch of the table's life that the present run calls 0
    newest_epoch: int  # the newest epoch of any row; 0 before the first
    class_names: tuple[str, ...]  # the names of the class numbers
    run: str  # id of the run whose labels these are; what it writes goes under this id
    parts: Mapping[int, StoredPart]
    attempt: int = 0  # which start of the run wrote it; 0: the run had not started to train
    catalogue: str = ""  # id of the catalogue whose rows these are
    noise: dict[str, float] | None = None  # fields of a NoiseModel: decide by predictions, not by logits
    earlier_noise: tuple[dict[str, float], ...] = ()  # of the networks before, the oldest first

    @classmethod
    def empty(
        cls, store: str | Path, class_names: Sequence[str], scale: float = 10.0, run: str | None = None
    ) -> "Manifest":
        """A table without rows; one made outside a run gets a new id."""
        layout, names = Layout.of(0, len(class_names)), tuple(class_names)
        return cls(Folder(store).url, layout, scale, 1, 0, names, run or new_id(), {})

    def save(self, url: str | Path) -> None:
        """Write the manifest, completely or not at all; only once the parts of every rank are stored."""
        self.require_whole()
        folder, name = _split(url)
        Folder(folder).put(name, self.encode())

    @classmethod
    def load(cls, url: str | Path) -> "Manifest":
        """Read a manifest that must be there."""
        folder, name = _split(url)
        return cls.decode(Folder(folder).get(name), str(url))

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
        found["earlier_noise"] = tuple(found["earlier_noise"])
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
        for name, one in vars(first).items():
            two = getattr(other, name)
            if one != two and name not in ("parts", "newest_epoch"):
                raise PencilError(
                    f"manifests disagree: {name} is {one} and {two}; merge what one run wrote at once"
                )
        both = first.parts.keys() & other.parts.keys()
        if both:
            raise PencilError(f"two manifests name part {min(both)}; a part has one owner")
        newest = max(first.newest_epoch, other.newest_epoch)
        first = replace(first, parts={**first.parts, **other.parts}, newest_epoch=newest)
    first.require_whole()
    return first


def fold_id(run: str, number: int) -> str:
    """The id under which a further training of a run writes what it needs until the run has ended."""
    return f"{run}{FOLD}{number}"


def is_fold(name: str, run: str) -> bool:
    """Whether a folder is named after a further training of this run."""
    return PurePosixPath(name).name.startswith(f"{run}{FOLD}")


def file_name(folder: str, file: StoredFile) -> str:
    """The name of a file in its store."""
    return f"{folder}/{file.run}/{file.sha256}.arrow"


def put_batch(store: Folder, folder: str, batch: pa.RecordBatch, run: str) -> StoredFile:
    """Write labels or a ledger under the run's id and the hash of their content, unless stored already."""
    # Epochs and classes of a ledger compress well; logits do not compress at all.
    options = pa.ipc.IpcWriteOptions(compression="zstd" if folder == LEDGER else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.remove_metadata(), options=options) as writer:
        writer.write_batch(batch.replace_schema_metadata(None))
    data = memoryview(sink.getvalue())
    file = StoredFile(hashlib.sha256(data).hexdigest(), data.nbytes, run)
    if not store.holds(file_name(folder, file), file.num_bytes):
        store.put(file_name(folder, file), data)
    return file


def get_batch(store: Folder, folder: str, file: StoredFile) -> pa.RecordBatch:
    """Read a file that a manifest names, and refuse bytes that are not those it names."""
    name = file_name(folder, file)
    for _ in range(READS):  # bytes may be lost or changed on their way
        data = store.get(name)
        found = hashlib.sha256(data).hexdigest()
        if found == file.sha256:
            break
    else:
        raise DamagedError(
            f"{store.path(name)}: damaged: {len(data):,} bytes with sha256 {found[:12]}, the manifest names "
            f"{file.num_bytes:,} bytes with {file.sha256[:12]}; restore it, or another manifest"
        )
    return pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)


def get_part(manifest: Manifest, part: int, folder: str) -> pa.RecordBatch:
    """Read the labels or the ledger of a part."""
    store, stored = Folder(manifest.store), manifest.parts[part]
    file = stored.labels if folder == LABELS else stored.ledger
    batch, num_rows = get_batch(store, folder, file), len(manifest.layout.rows_of(part))
    schema = (labels_schema if folder == LABELS else ledger_schema)(manifest.layout.num_classes)
    if not batch.schema.equals(schema) or batch.num_rows != num_rows:
        raise DamagedError(
            f"{store.path(file_name(folder, file))}: {batch.num_rows:,} rows of "
            f"{', '.join(map(str, batch.schema.types))}; the manifest names {num_rows:,} of "
            f"{manifest.layout.num_classes} classes: restore another one"
        )
    return batch


def get_parts(manifest: Manifest, parts: Iterable[int], folder: str) -> Iterator[pa.RecordBatch]:
    """Read the labels or the ledgers of parts in order, a few parts ahead."""
    return ahead(lambda part: get_part(manifest, part, folder), parts)


def ahead(get: Callable[[int], Result], parts: Iterable[int]) -> Iterator[Result]:
    """Get parts in order, a few of them ahead."""
    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        coming: deque[Future[Result]] = deque()
        for part in parts:
            coming.append(pool.submit(get, part))
            if len(coming) == PARALLEL_PARTS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def visited(manifest: Manifest, epoch: int) -> npt.NDArray[np.bool_]:
    """Which rows the present run visited in its `epoch`: what a plan leaves out after a crash."""
    manifest.require_whole()
    ledgers = get_parts(manifest, range(manifest.layout.num_parts), LEDGER)
    this_epoch = manifest.first_epoch + epoch
    seen = [ledger["last_epoch"].to_numpy() == this_epoch for ledger in ledgers]
    return np.concatenate([np.zeros(0, np.bool_), *seen])


def sweep_run(storage: str, run: str) -> list[str]:
    """Remove the label files of a run and its folds that no manifest of the storage names; return them."""
    files = Storage(storage)
    return remove_unnamed(files.path(files.labels), run, manifests_of(storage))


def manifests_beside_checkpoints(storage: str, run: str) -> list[Manifest]:
    """Read the manifests that name files of a run or its folds, except for those of checkpoints.

    They stay the same while the run trains.
    """
    found = manifests_of(storage, BESIDE_CHECKPOINTS)
    return [manifest for manifest in found if any(_is_of(part, run) for part in manifest.parts.values())]


def _is_of(part: StoredPart, run: str) -> bool:
    return part.labels.run.startswith(run) or part.ledger.run.startswith(run)


def remove_unnamed(store: str | Path, run: str, kept: Iterable[Manifest]) -> list[str]:
    """Remove the files that a run or its folds wrote and none of these manifests names; return them."""
    files, named = Folder(store), set[str]()
    for part in (part for manifest in kept for part in manifest.parts.values()):
        named |= {file_name(LABELS, part.labels), file_name(LEDGER, part.ledger)}
    folders = [f"{folder}/{run}" for folder in (LABELS, LEDGER)]
    folds = [name for folder in (LABELS, LEDGER) for name in files.names(folder) if is_fold(name, run)]
    written = [name for folder in (*folders, *folds) for name in files.names(folder)]
    swept = [name for name in written if name not in named]
    files.delete_all(swept)
    return swept


def manifests_of(
    storage: str, folders: Iterable[tuple[str, int | None, str]] = MANIFEST_FOLDERS
) -> list[Manifest]:
    """Read every manifest of labels in a storage: published, held, of runs, of nights, of checkpoints."""
    filesystem, root = filesystem_of(storage.rstrip("/"))
    filesystem.invalidate_cache()
    manifests = []
    for folder, depth, end in folders:
        for path in (path for path in filesystem.find(f"{root}/{folder}", depth) if path.endswith(end)):
            try:
                data = filesystem.cat_file(path)
                found = json.loads(data)
            except FileNotFoundError:  # a checkpoint that was removed meanwhile
                continue
            except ValueError as error:  # it may have been a manifest: what it named is not known
                raise PencilError(
                    f"{path}: damaged JSON ({error}); nothing is swept until it is removed"
                ) from None
            if isinstance(found, dict) and found.get("kind") == KIND:
                manifests.append(Manifest.decode(data, path))
    return manifests
