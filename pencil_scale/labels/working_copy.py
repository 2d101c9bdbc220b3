"""Working copy: the two files that an owner maps, and how they are made.

`labels.arrow` holds the labels, `ledger.arrow` the last epoch of each row. The labels get their name last, so
a folder with `labels.arrow` holds a complete table. Columns arrive as arrays in row order or as iterators of
chunks; chunks are spooled to disk, because a file starts with its number of rows.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.part_files import (
    LEDGER_SCHEMA,
    Layout,
    TableHeader,
    fixed_batch,
    labels_schema,
    write_part_file,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import named_storage_errors, written_beside

LABELS_FILE = "labels.arrow"
LEDGER_FILE = "ledger.arrow"

KeyBytes: TypeAlias = npt.NDArray[np.uint8]  # [N, 16]
Keys: TypeAlias = KeyBytes | Sequence[bytes] | pa.Array | pa.ChunkedArray  # Arrow: binary(16)
ClassSource: TypeAlias = npt.ArrayLike | Iterator[npt.ArrayLike]
KeySource: TypeAlias = Keys | Iterator[Keys]


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


def create_working_copy(
    folder: Path,
    noisy_class: ClassSource,
    class_names: Sequence[str],
    sample_keys: KeySource | None,
    scale: float,
    run: str,
) -> TableHeader:
    """Write the working copy of a new table, with no row visited."""
    num_classes = len(class_names)
    if num_classes < 2:
        raise PencilError(f"{folder}: {num_classes} class names; labels need at least 2 classes")
    with named_storage_errors(folder):
        if (folder / LABELS_FILE).exists():
            raise PencilError(f"{folder}: holds a label table already; open it, or empty the folder")
        with made_folder(folder), new_columns(noisy_class, sample_keys, num_classes, folder) as columns:
            classes, keys = columns
            layout = Layout.of(len(classes), num_classes)
            header = TableHeader(layout, tuple(range(layout.num_parts)), 1, scale, tuple(class_names), run)
            rows_of_parts = [layout.rows_of(part) for part in header.parts]
            labels = (
                new_labels(
                    rows, classes[rows.start : rows.stop], keys[rows.start : rows.stop], num_classes, scale
                )
                for rows in rows_of_parts
            )
            write_working_copy(folder, header, labels, (new_ledger(len(rows)) for rows in rows_of_parts))
    return header


def new_labels(
    rows: range, classes: npt.NDArray[np.int32], keys: KeyBytes, num_classes: int, scale: float
) -> pa.RecordBatch:
    """Rows as they enter the table: scale * one-hot, not pinned."""
    logits = scaled_one_hot(classes, num_classes, scale)
    unpinned = np.zeros(len(rows), np.uint8)
    columns: list[npt.NDArray[Any]] = [np.arange(rows.start, rows.stop), keys, classes, unpinned, logits]
    return fixed_batch(labels_schema(num_classes), columns)


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
) -> Iterator[tuple[npt.NDArray[np.int32], KeyBytes]]:
    """The classes and keys of new rows as two arrays, checked; chunks go through files in `folder`.

    Without keys the keys are zeros.
    """

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
