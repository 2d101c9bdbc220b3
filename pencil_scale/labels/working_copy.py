"""Working copy: the two files that an owner maps, and how they are made.

`labels.arrow` holds the labels, `ledger.arrow` the last epoch of each row. The labels get their name last, so
a folder with `labels.arrow` holds a complete table. Columns arrive as arrays in row order or as iterators of
chunks; chunks are spooled to disk, because a file starts with its number of rows.

`PartTracker` knows which parts moved since the last snapshot, so a snapshot stores only those.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import (
    LABELS_FOLDER,
    LEDGER_FOLDER,
    PARALLEL_PARTS,
    Manifest,
    StoredPart,
    put_batch,
)
from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    PartFile,
    TableHeader,
    fixed_batch,
    labels_schema,
    write_part_file,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder, written_beside

LABELS_FILE = "labels.arrow"
LEDGER_FILE = "ledger.arrow"

KeyBytes: TypeAlias = npt.NDArray[np.uint8]  # [N, 16]
Keys: TypeAlias = KeyBytes | Sequence[bytes] | pa.Array | pa.ChunkedArray  # Arrow: binary(16)
ClassSource: TypeAlias = npt.ArrayLike | Iterator[npt.ArrayLike]
KeySource: TypeAlias = Keys | Iterator[Keys]
NewColumns: TypeAlias = tuple[npt.NDArray[np.int32], KeyBytes]  # classes and keys of new rows


def write_working_copy(
    folder: Path, header: TableHeader, labels: Iterable[pa.RecordBatch], ledger: Iterable[pa.RecordBatch]
) -> None:
    """Write both files, the labels last; an existing table is removed before its ledger is replaced."""
    (folder / LABELS_FILE).unlink(missing_ok=True)
    schema = labels_schema(header.layout.num_classes)
    try:
        for name, columns, batches in ((LEDGER_FILE, LEDGER_SCHEMA, ledger), (LABELS_FILE, schema, labels)):
            with written_beside(folder / name, durable=False) as beside, beside.open("wb") as sink:
                write_part_file(sink, columns, header, batches)
    except BaseException:
        with suppress(OSError):  # a folder that cannot be written cannot be cleaned either
            (folder / LEDGER_FILE).unlink(missing_ok=True)
        raise


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder to work in; if the work fails, remove it, unless it was there before."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another process put something there
            for path in missing:
                path.rmdir()
        raise


def new_labels(
    rows: range, columns: NewColumns, num_classes: int, scale: float, first_row: int = 0
) -> pa.RecordBatch:
    """Rows as they enter the table: scale * one-hot, not pinned; `columns` start at `first_row`."""
    new = slice(rows.start - first_row, rows.stop - first_row)
    classes, keys = columns[0][new], columns[1][new]
    logits = scaled_one_hot(classes, num_classes, scale)
    unpinned = np.zeros(len(rows), np.uint8)
    numbers, schema = np.arange(rows.start, rows.stop), labels_schema(num_classes)
    return fixed_batch(schema, [numbers, keys, classes, unpinned, logits])


def new_ledger(num_rows: int) -> pa.RecordBatch:
    """The ledger of rows that were never visited."""
    return fixed_batch(LEDGER_SCHEMA, [np.zeros(num_rows, np.int32)])


def scaled_one_hot(classes: npt.NDArray[np.int32], num_classes: int, scale: float) -> npt.NDArray[np.float32]:
    """`scale` at each row's class; all zeros where the class is -1."""
    logits = np.zeros((len(classes), num_classes), np.float32)
    labelled = np.flatnonzero(classes >= 0)
    logits[labelled, classes[labelled]] = scale
    return logits


@contextmanager
def new_columns(
    noisy_class: ClassSource,
    sample_keys: KeySource | None,
    num_classes: int,
    folder: Path | None,
    first_row: int = 0,
) -> Iterator[NewColumns]:
    """The classes and keys of new rows, checked; without keys, zeros. Chunks go through files in `folder`."""

    def checked(chunks: Iterable[npt.ArrayLike]) -> Iterator[npt.NDArray[np.int32]]:
        start = first_row
        for chunk in chunks:
            classes = checked_classes(chunk, num_classes, first_row=start)
            start += len(classes)
            yield classes

    with tempfile.TemporaryDirectory(prefix="spool-", dir=folder) as spool:
        if isinstance(noisy_class, Iterator):
            classes = _spooled(checked(noisy_class), Path(spool) / "noisy_class", np.int32)
        else:
            classes = checked_classes(noisy_class, num_classes, first_row=first_row)
        if sample_keys is None:
            keys = np.broadcast_to(np.uint8(0), (len(classes), 16))
        elif isinstance(sample_keys, Iterator):
            chunks = (key_bytes(chunk) for chunk in sample_keys)
            keys = _spooled(chunks, Path(spool) / "sample_key", np.uint8).reshape(-1, 16)
        else:
            keys = key_bytes(sample_keys)
        if len(keys) != len(classes):
            raise PencilError(f"{len(keys):,} sample keys for {len(classes):,} rows; give one per row")
        yield classes, keys


def checked_classes(
    classes: npt.ArrayLike,
    num_classes: int,
    lowest: int = -1,
    first_row: int = 0,
    rows: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int32]:
    """Classes as int32, all in [lowest, num_classes); messages name `rows`, or count from `first_row`."""
    found = np.asarray(classes)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise PencilError(
            f"classes of type {found.dtype} and shape {found.shape}; give integers, one per row"
        )
    bad = np.flatnonzero((found < lowest) | (found >= num_classes))
    if bad.size:
        row = first_row + int(bad[0]) if rows is None else int(rows[bad[0]])
        raise PencilError(
            f"row {row:,}: class {found[bad[0]]} is not one of {num_classes} "
            f"({bad.size:,} such rows); classes are {lowest} to {num_classes - 1}"
        )
    return found.astype(np.int32, copy=False)


def key_bytes(keys: Keys) -> KeyBytes:
    """16-byte keys, in Arrow, NumPy or a sequence, as uint8 [N, 16]."""
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if isinstance(keys, np.ndarray):
        found = keys
    elif isinstance(keys, pa.Array) and len(keys):
        found = np.frombuffer(keys.buffers()[1], np.uint8)[16 * keys.offset : 16 * (keys.offset + len(keys))]
    else:
        found = np.frombuffer(b"".join(keys), np.uint8)
    if found.dtype != np.uint8 or found.size != 16 * len(keys):
        raise PencilError(f"sample keys of type {found.dtype} and shape {found.shape}; give 16 bytes per row")
    return found.reshape(-1, 16)


def _spooled(chunks: Iterable[npt.NDArray[Any]], path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk).data)
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


class PartTracker:
    """Which parts of a working copy have moved since its last snapshot or restore, and what is stored.

    A working copy that was merely reopened knows neither, so its first snapshot hashes every part; it still
    writes only what the store lacks.
    """

    def __init__(self, labels: PartFile, ledger: PartFile, restored: Manifest | None):
        self._labels, self._ledger, self._header = labels, ledger, labels.header
        num_parts = self._header.layout.num_parts
        self.labels_moved, self.ledger_moved = np.zeros(num_parts, np.bool_), np.zeros(num_parts, np.bool_)
        self._store = Folder(restored.store).url if restored else ""
        self._stored = dict(restored.parts) if restored else {}
        self._newest_epoch = restored.newest_epoch if restored else 0

    def snapshot(self, url: str | Path, parts: Sequence[int]) -> Manifest:
        """Store what moved in these parts, and name them all."""
        store, header = Folder(url), self._header
        if store.url != self._store:
            self._store, self._stored = store.url, {}
        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            newest = pool.map(lambda part: self._put_part(store, part), parts)
            self._newest_epoch = max(newest, default=self._newest_epoch)
        epochs = header.first_epoch, self._newest_epoch
        named = {part: self._stored[part] for part in parts}
        return Manifest(
            store.url, header.layout, header.scale, *epochs, header.class_names, header.run, named
        )

    def _put_part(self, store: Folder, part: int) -> int:
        """Store one part if it moved; return the newest epoch known after that."""
        stored, newest_epoch = self._stored.get(part), self._newest_epoch
        labels, ledger = (stored.labels, stored.ledger) if stored else (None, None)
        if labels is None or self.labels_moved[part]:
            labels = put_batch(store, LABELS_FOLDER, self._labels.batch(part), self._header.run)
        if ledger is None or self.ledger_moved[part]:
            batch = self._ledger.batch(part)
            ledger = put_batch(store, LEDGER_FOLDER, batch, self._header.run)
            newest_epoch = max(newest_epoch, int(batch.column("last_epoch").to_numpy().max()))
        self._stored[part] = StoredPart(labels, ledger)
        self.labels_moved[part] = self.ledger_moved[part] = False
        return newest_epoch
