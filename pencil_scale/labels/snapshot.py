"""Snapshots: how parts get into a store under the names of their contents, and back out.

Parts are written first, and what is returned names only what is there; so whoever saves that manifest last
has a complete snapshot, and a kill at any moment before leaves only files that no manifest names, for
`sweep`.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import Manifest, PartEntry, Piece
from pencil_scale.labels.part_files import LEDGER_SCHEMA, Header, PartFile, labels_schema
from pencil_scale.labels.working_copy import write_working_copy
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder

LABELS_FOLDER = "parts"
LEDGER_FOLDER = "ledger"
PARALLEL_PARTS = 4  # parts in flight to or from a store: hides its latency, bounds the memory at 4 parts


def put_piece(store: Folder, folder: str, batch: pa.RecordBatch, run: str) -> Piece:
    """Write one record batch under the run's id and the name of its content, unless it is there already."""
    # The ledger is mostly runs of one number and shrinks to nothing; logits would not shrink at all.
    options = pa.ipc.IpcWriteOptions(compression="zstd" if folder == LEDGER_FOLDER else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.remove_metadata(), options=options) as writer:
        writer.write_batch(batch.replace_schema_metadata(None))
    data = memoryview(sink.getvalue())
    piece = Piece(hashlib.sha256(data).hexdigest(), data.nbytes, batch.num_rows, run)
    if not store.holds(piece_name(folder, piece), piece.num_bytes):
        store.put(piece_name(folder, piece), data)
    return piece


def piece_name(folder: str, piece: Piece) -> str:
    """Where a piece is stored."""
    return f"{folder}/{piece.run}/{piece.sha256}.arrow"


def get_piece(store: Folder, folder: str, piece: Piece, schema: pa.Schema) -> pa.RecordBatch:
    """Read a piece back, and refuse one whose bytes are not those the manifest names."""
    name = piece_name(folder, piece)
    data = store.get(name)
    found = hashlib.sha256(data).hexdigest()
    if found != piece.sha256:
        raise DamagedError(
            f"{store.path(name)}: damaged: {len(data):,} bytes with sha256 {found[:12]}, the manifest names "
            f"{piece.num_bytes:,} bytes with {piece.sha256[:12]}; fetch it again, or restore another manifest"
        )
    reader = pa.ipc.open_file(pa.py_buffer(data))
    if not reader.schema.equals(schema):
        raise PencilError(f"{store.path(name)}: its columns are not those of the manifest's class count")
    return reader.get_batch(0)


def get_part(manifest: Manifest, store: Folder, part: int, folder: str) -> pa.RecordBatch:
    """Read all pieces of one part as one record batch."""
    entry = manifest.parts[part]
    pieces = entry.labels if folder == LABELS_FOLDER else entry.ledger
    schema = labels_schema(manifest.layout.num_classes) if folder == LABELS_FOLDER else LEDGER_SCHEMA
    batches = [get_piece(store, folder, piece, schema) for piece in pieces]
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    if batch.num_rows != len(manifest.layout.rows_of(part)):
        raise DamagedError(
            f"manifest over {manifest.store}: part {part} has {batch.num_rows:,} rows in its pieces, "
            f"expected {len(manifest.layout.rows_of(part)):,}; restore another manifest"
        )
    return batch


def get_parts(manifest: Manifest, parts: Iterable[int], folder: str) -> Iterator[pa.RecordBatch]:
    """Read parts in order, a few ahead of the reader."""
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
    """Write a working copy of these parts, every hash checked."""
    header = Header(
        manifest.layout, parts, manifest.first_epoch, manifest.scale, manifest.class_names, manifest.run
    )
    labels = get_parts(manifest, parts, LABELS_FOLDER)
    write_working_copy(folder, header, labels, get_parts(manifest, parts, LEDGER_FOLDER))


class PartTracker:
    """Which parts of a working copy have moved since its last snapshot or restore, and what the store has.

    A working copy that was merely reopened knows neither, so its first snapshot hashes every part; the store
    is still given only what it lacks.
    """

    def __init__(self, labels: PartFile, ledger: PartFile):
        self._labels, self._ledger = labels, ledger
        self._header = labels.header
        self.labels_moved = np.zeros(self._header.layout.num_parts, np.bool_)
        self.ledger_moved = np.zeros(self._header.layout.num_parts, np.bool_)
        self._store = ""
        self._entries: dict[int, PartEntry] = {}
        self._newest_epoch = 0

    def remember(self, manifest: Manifest) -> None:
        """The working copy was made from this manifest."""
        self._store, self._newest_epoch = Folder(manifest.store).url, manifest.newest_epoch
        self._entries = {part: manifest.parts[part] for part in self._header.parts}

    def snapshot(self, url: str | Path, parts: Sequence[int]) -> Manifest:
        """Put what moved of these parts into the store, and name them all."""
        store = Folder(url)
        if store.url != self._store:
            self._store, self._entries = store.url, {}
        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            epochs_found = pool.map(lambda part: self._put_part(store, part), parts)
            self._newest_epoch = max(epochs_found, default=self._newest_epoch)
        header = self._header
        epochs = header.first_epoch, self._newest_epoch
        entries = {part: self._entries[part] for part in parts}
        identity = header.class_names, header.run
        return Manifest(store.url, header.layout, header.scale, *epochs, *identity, entries)

    def _put_part(self, store: Folder, part: int) -> int:
        """Put one part if it moved; the newest epoch known after that."""
        entry, newest_epoch = self._entries.get(part), self._newest_epoch
        if entry is None or self.labels_moved[part]:
            labels: tuple[Piece, ...] = (
                put_piece(store, LABELS_FOLDER, self._labels.batch(part), self._header.run),
            )
        else:
            labels = entry.labels
        if entry is None or self.ledger_moved[part]:
            batch = self._ledger.batch(part)
            ledger: tuple[Piece, ...] = (put_piece(store, LEDGER_FOLDER, batch, self._header.run),)
            newest_epoch = max(newest_epoch, int(batch.column("last_epoch").to_numpy().max()))
        else:
            ledger = entry.ledger
        self._entries[part] = PartEntry(labels, ledger)
        self.labels_moved[part] = self.ledger_moved[part] = False
        return newest_epoch


def get_ledger(manifest: Manifest) -> Iterator[tuple[range, npt.NDArray[np.int32]]]:
    """Read the ledger of a manifest, part by part, without any logits: rows, and the last epoch of each."""
    manifest.require_whole()
    store = Folder(manifest.store)
    for part in range(manifest.layout.num_parts):
        batch = get_part(manifest, store, part, LEDGER_FOLDER)
        yield manifest.layout.rows_of(part), batch.column("last_epoch").to_numpy()


def visited(manifest: Manifest, epoch: int) -> npt.NDArray[np.bool_]:
    """Which rows the present run visited in its `epoch`: what a plan leaves out after a crash."""
    seen = np.zeros(manifest.layout.num_rows, np.bool_)
    for rows, last_epoch in get_ledger(manifest):
        seen[rows.start : rows.stop] = last_epoch == manifest.first_epoch + epoch
    return seen


def sweep(store: str | Path, run: str, kept: Iterable[Manifest]) -> list[str]:
    """Remove the pieces that one run wrote and no manifest names; return their names.

    For the run itself while it writes nothing: a piece is written before the manifest that names it.
    """
    parts, named = Folder(store), set[str]()
    for entry in (entry for manifest in kept for entry in manifest.parts.values()):
        named.update(piece_name(LABELS_FOLDER, piece) for piece in entry.labels)
        named.update(piece_name(LEDGER_FOLDER, piece) for piece in entry.ledger)
    written = [name for folder in (LABELS_FOLDER, LEDGER_FOLDER) for name in parts.names(f"{folder}/{run}")]
    swept = [name for name in written if name not in named]
    for name in swept:
        parts.delete(name)
    return swept
