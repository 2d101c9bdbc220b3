"""Snapshots: how parts are stored under the names of their contents, read back, and removed.

Parts are written first, and a manifest names only what is stored; so once the manifest is saved the snapshot
is complete. A process killed before that leaves files that no manifest names, which `sweep_run` removes.

A run removes only files it wrote itself, under its own id, and only while it writes nothing: a file without
a manifest may belong to a run that is about to save one. Files that any manifest of the storage names stay:
the labels of another run may rest on parts of this one.

    swept = sweep_run("s3://lake/clothing1m", run_id)
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import KIND, Manifest, StoredFile, StoredPart
from pencil_scale.labels.part_files import LEDGER_SCHEMA, PartFile, TableHeader, labels_schema
from pencil_scale.labels.working_copy import write_working_copy
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

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


def restore_working_copy(manifest: Manifest, folder: Path, parts: tuple[int, ...]) -> None:
    """Write a working copy of these parts, checking every hash."""
    identity = manifest.first_epoch, manifest.scale, manifest.class_names, manifest.run
    labels, ledger = (get_parts(manifest, parts, kind) for kind in (LABELS_FOLDER, LEDGER_FOLDER))
    write_working_copy(folder, TableHeader(manifest.layout, parts, *identity), labels, ledger)


class PartTracker:
    """Which parts of a working copy have moved since its last snapshot or restore, and what is stored.

    A working copy that was merely reopened knows neither, so its first snapshot hashes every part; it still
    writes only what the store lacks.
    """

    def __init__(self, labels: PartFile, ledger: PartFile):
        self._labels, self._ledger = labels, ledger
        self._header = labels.header
        self.labels_moved = np.zeros(self._header.layout.num_parts, np.bool_)
        self.ledger_moved = np.zeros(self._header.layout.num_parts, np.bool_)
        self._store = ""
        self._stored: dict[int, StoredPart] = {}
        self._newest_epoch = 0

    def remember(self, manifest: Manifest) -> None:
        """The working copy was made from this manifest."""
        self._store, self._newest_epoch = Folder(manifest.store).url, manifest.newest_epoch
        self._stored = {part: manifest.parts[part] for part in self._header.parts}

    def snapshot(self, url: str | Path, parts: Sequence[int]) -> Manifest:
        """Store what moved in these parts, and name them all."""
        store, header = Folder(url), self._header
        if store.url != self._store:
            self._store, self._stored = store.url, {}
        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            epochs = pool.map(lambda part: self._put_part(store, part), parts)
            self._newest_epoch = max(epochs, default=self._newest_epoch)
        return Manifest(
            store.url,
            header.layout,
            header.scale,
            header.first_epoch,
            self._newest_epoch,
            header.class_names,
            header.run,
            {part: self._stored[part] for part in parts},
        )

    def _put_part(self, store: Folder, part: int) -> int:
        """Store one part if it moved; return the newest epoch known after that."""
        stored, newest_epoch = self._stored.get(part), self._newest_epoch
        if stored is None or self.labels_moved[part]:
            labels = put_batch(store, LABELS_FOLDER, self._labels.batch(part), self._header.run)
        else:
            labels = stored.labels
        if stored is None or self.ledger_moved[part]:
            batch = self._ledger.batch(part)
            ledger = put_batch(store, LEDGER_FOLDER, batch, self._header.run)
            newest_epoch = max(newest_epoch, int(batch.column("last_epoch").to_numpy().max()))
        else:
            ledger = stored.ledger
        self._stored[part] = StoredPart(labels, ledger)
        self.labels_moved[part] = self.ledger_moved[part] = False
        return newest_epoch


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
    manifests = []
    for folder, depth, ending in MANIFEST_PLACES:
        for path in filesystem.find(f"{root}/{folder}", depth):
            if path.endswith(ending):
                data = filesystem.cat_file(path)
                if _is_manifest(path, data):
                    manifests.append(Manifest.decode(data, path))
    return manifests


def _is_manifest(path: str, data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError as error:  # it may have been a manifest: what it named is not known
        raise PencilError(f"{path}: damaged JSON ({error}); nothing is swept until it is removed") from None
    return isinstance(found, dict) and found.get("kind") == KIND
