"""Working copy: the two files an owner maps, and how they come to be.

`labels.arrow` holds the labels, `ledger.arrow` the last epoch of each row. The labels get their name last,
so a folder with `labels.arrow` holds a whole table. Columns arrive as arrays in row order or as iterators of
chunks; chunks are spooled to disk, because the size of a part follows from the number of rows.
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
    Header,
    choose_layout,
    fixed_batch,
    labels_schema,
    write_part_file,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import named_storage_errors, written_beside

LABELS_FILE = "labels.arrow"
LEDGER_FILE = "ledger.arrow"

Keys: TypeAlias = npt.NDArray[np.uint8] | Sequence[bytes] | pa.Array  # uint8 [N, 16], bytes, or binary(16)
ClassSource: TypeAlias = npt.ArrayLike | Iterator[npt.ArrayLike]
KeySource: TypeAlias = Keys | Iterator[Keys]


def write_working_copy(
    folder: Path, header: Header, labels: Iterable[pa.RecordBatch], ledger: Iterable[pa.RecordBatch]
) -> None:
    """Write both files, the labels last; a table already there goes before its ledger is replaced."""
    (folder / LABELS_FILE).unlink(missing_ok=True)
    schema = labels_schema(header.layout.num_classes)
    try:
        for name, columns, batches in ((LEDGER_FILE, LEDGER_SCHEMA, ledger), (LABELS_FILE, schema, labels)):
            with written_beside(folder / name, durable=False) as beside, beside.open("wb") as sink:
                write_part_file(sink, columns, header, batches)
    except BaseException:
        with suppress(OSError):  # where it cannot be written, it cannot be removed either
            (folder / LEDGER_FILE).unlink(missing_ok=True)
        raise


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder to work in; if the work fails, a folder that was not there before goes again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # somebody else put something there
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
) -> Header:
    """Write the working copy of a new table, whose rows nobody has visited."""
    num_classes = len(class_names)
    if num_classes < 2:
        raise PencilError(f"{folder}: {num_classes} class names; labels need at least 2 classes")
    with named_storage_errors(folder):
        if (folder / LABELS_FILE).exists():
            raise PencilError(f"{folder}: holds a label table already; open it, or empty the folder")
        with made_folder(folder), tempfile.TemporaryDirectory(prefix="spool-", dir=folder) as spool:
            classes = class_column(noisy_class, num_classes, Path(spool))
            keys = key_column(sample_keys, len(classes), Path(spool))
            layout = choose_layout(len(classes), num_classes)
            parts = tuple(range(layout.num_parts))
            header = Header(layout, parts, 1, scale, tuple(class_names), run)
            write_working_copy(folder, header, first_labels(header, classes, keys), first_ledger(header))
    return header


def first_labels(
    header: Header, classes: npt.NDArray[np.int32], keys: npt.NDArray[np.uint8] | None
) -> Iterator[pa.RecordBatch]:
    """The labels of a new table, part by part."""
    for part in header.parts:
        rows = header.layout.rows_of(part)
        here = slice(rows.start, rows.stop)
        yield new_rows(rows, classes[here], None if keys is None else keys[here], header)


def new_rows(
    rows: range, classes: npt.NDArray[np.int32], keys: npt.NDArray[np.uint8] | None, header: Header
) -> pa.RecordBatch:
    """Rows as they enter the table: scale * one-hot, not pinned; without keys the keys are zeros."""
    num_classes = header.layout.num_classes
    key = np.zeros((len(rows), 16), np.uint8) if keys is None else keys
    unpinned = np.zeros(len(rows), np.uint8)
    logits = scaled_one_hot(classes, num_classes, header.scale)
    row = np.arange(rows.start, rows.stop)
    columns: list[npt.NDArray[Any]] = [row, key, classes, unpinned, logits]
    return fixed_batch(labels_schema(num_classes), columns)


def first_ledger(header: Header) -> Iterator[pa.RecordBatch]:
    """The ledger of a new table, part by part."""
    for part in header.parts:
        yield new_marks(len(header.layout.rows_of(part)))


def new_marks(num_rows: int) -> pa.RecordBatch:
    """The ledger of rows that nobody has visited."""
    return fixed_batch(LEDGER_SCHEMA, [np.zeros(num_rows, np.int32)])


def scaled_one_hot(classes: npt.NDArray[np.int32], num_classes: int, scale: float) -> npt.NDArray[np.float32]:
    """`scale` at each row's class; zeros all along where the class is -1."""
    logits = np.zeros((len(classes), num_classes), np.float32)
    labelled = np.flatnonzero(classes >= 0)
    logits[labelled, classes[labelled]] = scale
    return logits


def class_column(
    source: ClassSource, num_classes: int, spool: Path, first_row: int = 0
) -> npt.NDArray[np.int32]:
    """The given classes as one array, checked; chunks go through a file in `spool`."""
    if not isinstance(source, Iterator):
        return checked_classes(source, num_classes, first_row=first_row)

    def checked() -> Iterator[npt.NDArray[np.int32]]:
        start = first_row
        for chunk in source:
            classes = checked_classes(chunk, num_classes, first_row=start)
            start += len(classes)
            yield classes

    return _spooled(checked(), spool / "noisy_class", np.int32).reshape(-1)


def key_column(source: KeySource | None, num_rows: int, spool: Path) -> npt.NDArray[np.uint8] | None:
    """The sample keys as one array [N, 16]; chunks go through a file in `spool`."""
    if source is None:
        return None
    if isinstance(source, Iterator):
        keys = _spooled((_key_bytes(chunk) for chunk in source), spool / "sample_key", np.uint8)
    else:
        keys = _key_bytes(source)
    keys = keys.reshape(-1, 16)
    if len(keys) != num_rows:
        raise PencilError(f"{len(keys):,} sample keys for {num_rows:,} rows; give one a row")
    return keys


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
        raise PencilError(f"classes of type {found.dtype} and shape {found.shape}; give integers, one a row")
    bad = np.flatnonzero((found < lowest) | (found >= num_classes))
    if bad.size:
        row = first_row + int(bad[0]) if rows is None else int(rows[bad[0]])
        raise PencilError(
            f"row {row:,}: class {found[bad[0]]} is not one of {num_classes} "
            f"({bad.size:,} such rows); classes are {lowest} to {num_classes - 1}"
        )
    return found.astype(np.int32, copy=False)


def _key_bytes(keys: Keys) -> npt.NDArray[np.uint8]:
    if isinstance(keys, np.ndarray):
        found = keys
    elif isinstance(keys, pa.Array):
        found = np.frombuffer(keys.buffers()[1], np.uint8)[16 * keys.offset : 16 * (keys.offset + len(keys))]
    else:
        found = np.frombuffer(b"".join(keys), np.uint8)
    if found.dtype != np.uint8 or found.size != 16 * len(keys):
        raise PencilError(f"sample keys of type {found.dtype} and shape {found.shape}; give 16 bytes a row")
    return found


def _spooled(chunks: Iterable[npt.NDArray[Any]], path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk).data)
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
