"""Label table: one row of label logits per catalogue row, memory-mapped, in Arrow.

An owner restores its parts of a manifest into one Arrow file on local disk, with one record batch per part,
and changes rows in place. The file stays valid Arrow, so any program may open it at any time. Rows that are
not visited keep their logits. A new column needs only a place in a schema of `columns`.

    table = LabelTable.restore(manifest, folder, parts=[0, 3])
    logits = table.read(rows)                 # float32 [B, C]
    table.read(rows, "noisy_class")           # or any other column
    table.write(rows, moved, predicted, epoch=7)    # in place; the ledger remembers epoch 7 and predictions
    manifest = table.snapshot()               # complete and hashed, or not there at all

The ledger counts epochs over the table's life, from 1; `epoch` in every call here counts from 0 in the
present run. Only snapshots are promised to survive a crash: a working copy is scratch.
"""

import mmap
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.class_names import difference
from pencil_scale.labels.columns import (
    PINNED,
    WATCHED,
    Int64s,
    labels_schema,
    ledger_schema,
    prediction_width,
)
from pencil_scale.labels.manifest import (
    LABELS,
    LEDGER,
    PARALLEL_PARTS,
    Manifest,
    StoredPart,
    get_parts,
    put_batch,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder, written_beside

LABELS_FILE = "labels.arrow"
LAST_EPOCH = 2**31 - 1  # of a table's life: the ledger keeps 32 bits


class LabelTable:
    """The learned labels of some or all parts of a table, on the local disk of their owner.

    The checks of rows run on every batch, so they are written for speed: on arrays this small `count_nonzero`
    and `argmax` are several times faster than `any`, `all` and `max`.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: Sequence[int]):
        """Map a working copy that has these parts of a manifest; use `restore`."""
        self.folder, self.layout, self.parts = folder, manifest.layout, tuple(parts)
        # What is stored of these parts. An owner that is killed loses what it has moved since.
        self.manifest = replace(manifest, parts={part: manifest.parts[part] for part in parts})
        with (folder / LABELS_FILE).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        # Rows are visited in random order: bring in the page of a row, not its neighbours.
        self._map.madvise(mmap.MADV_RANDOM)
        buffer = pa.py_buffer(self._map)
        reader = pa.ipc.open_file(buffer)
        self._batches = {part: reader.get_batch(nth) for nth, part in enumerate(self.parts)}
        self._columns = {}
        for name, kind in zip(reader.schema.names, reader.schema.types, strict=True):
            starts = np.zeros(self.layout.num_parts, np.int64)  # of these parts; no other is looked up
            for part, batch in self._batches.items():
                starts[part] = batch.column(name).buffers()[-1].address - buffer.address
            memory = np.frombuffer(self._map, np.uint8)
            self._columns[name] = _Column(memory, kind, starts, self.layout.part_rows)
        self._here = np.zeros(self.layout.num_parts, np.bool_)
        self._here[list(self.parts)] = True
        self._labels_moved, self._ledger_moved = np.zeros_like(self._here), np.zeros_like(self._here)
        self._newest_epoch = manifest.newest_epoch
        self._lock = threading.Lock()

    @classmethod
    def restore(
        cls,
        manifest: Manifest,
        folder: str | Path,
        parts: Iterable[int] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> "LabelTable":
        """Make a working copy of a manifest, or of some of its parts, checking every hash.

        A working copy already in the folder is replaced: that of a dead attempt is never trusted.
        """
        if class_names is not None and manifest.class_names != tuple(class_names):
            raise PencilError(
                f"manifest over {manifest.store}: the class list of these labels "
                f"{difference(manifest.class_names, class_names)}, compared with the one they are used with; "
                "use the class list the table was made with, or remap the table"
            )
        if parts is None:
            manifest.require_whole()
        chosen = sorted(manifest.parts if parts is None else set(parts))
        for part in set(chosen) - set(manifest.parts):
            raise PencilError(f"manifest over {manifest.store}: has no part {part} to restore")
        stored = (get_parts(manifest, chosen, LABELS), get_parts(manifest, chosen, LEDGER))
        num_classes = manifest.layout.num_classes
        schema = pa.schema([*labels_schema(num_classes), *ledger_schema(num_classes)])
        # Every block is written, so a full disk fails here. A hole in the file would fail later, as a SIGBUS
        # in the first process that touches it.
        with written_beside(Path(folder) / LABELS_FILE, durable=False) as beside, beside.open("wb") as sink:
            metadata = {"pencil_scale": replace(manifest, parts={}).encode()}
            with pa.ipc.new_file(sink, schema.with_metadata(metadata)) as writer:
                for labels, ledger in zip(*stored, strict=True):
                    columns = [*labels.columns, *ledger.columns]
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return cls(Path(folder), manifest, chosen)

    def check_rows(self, rows: npt.ArrayLike) -> Int64s:
        """Refuse rows that the table does not have; their parts may be elsewhere."""
        found = np.asarray(rows)
        if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
            raise PencilError(f"rows of type {found.dtype}, shape {found.shape}; give a list of row numbers")
        found = found.astype(np.int64, copy=False)
        unsigned = found.view(np.uint64)  # a negative row is a huge one
        if found.size and unsigned.item(unsigned.argmax()) >= self.layout.num_rows:
            outside = found[unsigned >= self.layout.num_rows]
            self._refuse(outside, f"outside the table's {self.layout.num_rows:,} rows")
        return found

    def read(self, rows: npt.ArrayLike, column: str = "label_logits") -> npt.NDArray[Any]:
        """The values of these rows, in their order: [B], or [B, width]."""
        return self._columns[column].get(*self._find(rows))

    def rows_with(self, role: int) -> Int64s:
        """The rows of the parts here that have this role, in rising order."""
        found = [np.zeros(0, np.int64)]
        for part, batch in self._batches.items():
            found.append(self.layout.rows_of(part).start + np.flatnonzero(batch["role"].to_numpy() == role))
        return np.concatenate(found)

    def write(
        self, rows: npt.ArrayLike, logits: npt.ArrayLike, predicted: npt.ArrayLike | None, epoch: int
    ) -> None:
        """Move these rows to new logits and mark them as visited; pinned rows are marked and stay.

        All rows are checked before any is written. Logits go first: a row marked with the epoch has moved.
        """
        rows, parts = self._find(rows)
        packed = self._packed(rows, predicted)
        with np.errstate(over="ignore"):  # a number too large becomes infinite, and is refused
            values = np.asarray(logits, np.float32)
        expected = (len(rows), self.layout.num_classes)
        if values.shape != expected:
            raise PencilError(f"{self.folder}: logits of shape {values.shape}; expected {expected}")
        finite = np.isfinite(values)
        if np.count_nonzero(finite) < values.size:
            self._refuse(rows[~finite.all(axis=1)], "given logits that are not finite numbers of 32 bits")
        with self._lock:
            self._require_unvisited(rows, parts, epoch)
            moved, moved_parts, role = rows, parts, self._columns["role"].get(rows, parts)
            if np.count_nonzero(role == WATCHED):
                self._refuse(rows[role == WATCHED], "watched, so its label does not move; mark it instead")
            free = role != PINNED
            if np.count_nonzero(free) < len(rows):
                moved, moved_parts, values = rows[free], parts[free], values[free]
            self._labels_moved[moved_parts] = True
            self._columns["label_logits"].set(moved, moved_parts, values)
            self._predict(rows, parts, packed)
            self._mark(rows, parts, epoch)

    def mark(self, rows: npt.ArrayLike, predicted: npt.ArrayLike | None, epoch: int) -> None:
        """Mark these rows as visited, leaving their labels alone.

        Watched rows only get their prediction: they are never trained on, and may be predicted repeatedly.
        """
        rows, parts = self._find(rows)
        packed = self._packed(rows, predicted)
        with self._lock:
            trained = self._columns["role"].get(rows, parts) != WATCHED
            self._require_unvisited(rows[trained], parts[trained], epoch)
            self._predict(rows, parts, packed)
            self._mark(rows[trained], parts[trained], epoch)

    def count_visited(self, epoch: int) -> int:
        """How many rows of the parts here were last visited in this epoch."""
        ledgers = (batch["last_epoch"].to_numpy() for batch in self._batches.values())
        return sum(int(np.count_nonzero(ledger == self.manifest.first_epoch + epoch)) for ledger in ledgers)

    def snapshot(self) -> Manifest:
        """Put the parts that moved into the manifest's store, and name all parts here as they are now.

        Writes wait meanwhile. The manifest is not saved: with several ranks it is incomplete.
        """
        with self._lock:
            self._map.madvise(mmap.MADV_NORMAL)  # parts are read from end to end
            store = Folder(self.manifest.store)
            with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
                stored = pool.map(lambda part: self._put_part(store, part), self.parts)
                parts = dict(zip(self.parts, stored, strict=True))
            self.manifest = replace(self.manifest, parts=parts, newest_epoch=self._newest_epoch)
            self._labels_moved[:] = self._ledger_moved[:] = False
            self._map.madvise(mmap.MADV_RANDOM)
            self._map.madvise(mmap.MADV_DONTNEED)  # what was written stays in the file
        return self.manifest

    def _put_part(self, store: Folder, part: int) -> StoredPart:
        stored, batch, run = self.manifest.parts[part], self._batches[part], self.manifest.run
        if self._labels_moved[part]:
            labels = batch.select(labels_schema(self.layout.num_classes).names)
            stored = replace(stored, labels=put_batch(store, LABELS, labels, run))
        if self._ledger_moved[part]:
            ledger = batch.select(ledger_schema(self.layout.num_classes).names)
            stored = replace(stored, ledger=put_batch(store, LEDGER, ledger, run))
        return stored

    def _find(self, rows: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """These rows as an array, and the part of each; refuse rows of parts that are elsewhere."""
        found = self.check_rows(rows)
        parts = found >> self.layout.shift
        here = self._here[parts]
        if np.count_nonzero(here) < len(found):
            self._refuse(found[~here], "in a part that is not in this working copy")
        return found, parts

    def _require_unvisited(self, rows: Int64s, parts: Int64s, epoch: int) -> None:
        """Refuse rows given twice, and rows marked with this epoch or a later one."""
        ordered = np.sort(rows)
        repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(repeated):
            self._refuse(ordered[1:][repeated], "given twice in one write")
        first_epoch = self.manifest.first_epoch
        if not 0 <= epoch <= LAST_EPOCH - first_epoch:
            raise PencilError(f"{self.folder}: epoch {epoch}; a run counts its epochs from 0")
        last_epoch = self._columns["last_epoch"].get(rows, parts)
        seen = last_epoch >= first_epoch + epoch
        if np.count_nonzero(seen):
            last = int(last_epoch[seen][0]) - first_epoch
            self._refuse(
                rows[seen], f"visited in epoch {last + 1} already, written again in epoch {epoch + 1}"
            )

    def _packed(self, rows: Int64s, predicted: npt.ArrayLike | None) -> npt.NDArray[np.float32]:
        """Predictions as [B, 2 K]: K classes, and their log-probabilities.

        NaN, or None for all, keeps the prediction that a row has.
        """
        expected = (len(rows), prediction_width(self.layout.num_classes))
        if predicted is None:
            return np.full(expected, np.nan, np.float32)
        packed = np.asarray(predicted, np.float32)
        if packed.shape != expected:
            raise PencilError(f"{self.folder}: predictions of shape {packed.shape}; expected {expected}")
        return packed

    def _predict(self, rows: Int64s, parts: Int64s, packed: npt.NDArray[np.float32]) -> None:
        top = packed.shape[1] // 2
        known = ~np.isnan(packed[:, top])
        if np.count_nonzero(known) < len(rows):
            rows, parts, packed = rows[known], parts[known], packed[known]
        self._ledger_moved[parts] = True
        self._columns["predicted_class"].set(rows, parts, packed[:, :top])
        self._columns["predicted_log_p"].set(rows, parts, packed[:, top:])

    def _mark(self, rows: Int64s, parts: Int64s, epoch: int) -> None:
        self._ledger_moved[parts] = True
        self._columns["last_epoch"].set(rows, parts, self.manifest.first_epoch + epoch)
        if len(rows):
            self._newest_epoch = max(self._newest_epoch, self.manifest.first_epoch + epoch)

    def _refuse(self, rows: Int64s, why: str) -> NoReturn:
        """Name the first of these rows and the reason."""
        others = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise PencilError(f"{self.folder}: row {rows[0]}{others}: {why}")


class _Column:
    """One column of a mapped table: every row is one item of a strided array over the whole file."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], kind: pa.DataType, starts: Int64s, part_rows: int
    ) -> None:
        """`starts` says at which byte the values of each part start."""
        self._width = 1
        if pa.types.is_fixed_size_list(kind):
            kind, self._width = kind.value_type, kind.list_size
        elif pa.types.is_fixed_size_binary(kind):
            kind, self._width = pa.uint8(), kind.byte_width
        self._dtype = np.dtype(kind.to_pandas_dtype())
        # A row of several values is one opaque item: NumPy then copies it with one call, not value by value.
        wide = np.dtype((np.void, self._dtype.itemsize * self._width))
        self._row_type = self._dtype if self._width == 1 else wide
        step, row_bytes = self._dtype.itemsize, self._row_type.itemsize
        # Every value of the file starts an item. Items overlap, but a part's rows are `width` values apart,
        # and so one index reaches all parts, the shorter last one too.
        num_items = max((memory.size - row_bytes) // step + 1, 0)  # none if the file is empty
        first_item = memory[: row_bytes * min(num_items, 1)].view(self._row_type)
        self._items = np.lib.stride_tricks.as_strided(first_item, (num_items,), (step,))
        # Where row 0 would be if the whole table were laid out as this part is: start + slot = origin + row.
        self._origins = starts // step - np.arange(len(starts)) * part_rows * self._width

    def get(self, rows: Int64s, parts: Int64s) -> npt.NDArray[Any]:
        """The values of these rows, which are in these parts: [B], or [B, width]."""
        found: npt.NDArray[Any] = self._items[self._origins[parts] + rows * self._width]
        return found if self._width == 1 else found.view(self._dtype).reshape(-1, self._width)

    def set(self, rows: Int64s, parts: Int64s, values: npt.NDArray[Any] | int) -> None:
        """Change these rows in place: to one row each, or all to one number."""
        if self._width > 1:
            values = np.ascontiguousarray(values, self._dtype).view(self._row_type)[:, 0]
        self._items[self._origins[parts] + rows * self._width] = values
