"""Label table: one row of label logits per catalogue row, memory-mapped, in Arrow.

The file stays a valid Arrow file while its owner moves rows in place, so any program may open it at any time.
Rows that are not visited keep their logits. A row's part and slot are arithmetic.

    table = LabelTable.open(folder, writable_parts=[0, 3])
    logits = table.read(rows)                 # float32 [B, C]
    table.write(rows, moved, epoch=7)         # in place; the ledger remembers epoch 7
    manifest = table.snapshot(store)          # complete and hashed, or not there at all

The ledger counts epochs over the table's life, from 1; `epoch` in every call here counts from 0 in the
present run. Only snapshots are promised to survive a crash: a working copy is scratch.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.class_names import difference
from pencil_scale.labels.manifest import LABELS_FOLDER, LEDGER_FOLDER, Manifest, get_parts
from pencil_scale.labels.part_files import Column, Int64s, Layout, PartFile, RowChecks, TableHeader
from pencil_scale.labels.working_copy import (
    LABELS_FILE,
    LEDGER_FILE,
    ClassSource,
    KeySource,
    PartTracker,
    checked_classes,
    made_folder,
    new_columns,
    new_labels,
    new_ledger,
    scaled_one_hot,
    write_working_copy,
)
from pencil_scale.storage.errors import DamagedError, PencilError, new_id
from pencil_scale.storage.folder import named_storage_errors

LAST_EPOCH = 2**31 - 1  # of a table's life: the ledger keeps 32 bits


class LabelTable:
    """The learned labels of some or all parts of a table, on local disk."""

    def __init__(self, folder: Path, writable_parts: Sequence[int], restored: Manifest | None = None):
        """Map an existing working copy; use `create`, `open` or `restore`."""
        self.folder = folder
        self._labels = PartFile(folder / LABELS_FILE, writable=bool(writable_parts))
        self._ledger = PartFile(folder / LEDGER_FILE, writable=bool(writable_parts))
        header = self._labels.header
        if self._ledger.header != header:
            raise DamagedError(
                f"{folder}: {LABELS_FILE} and {LEDGER_FILE} belong to different tables; restore the table"
            )
        self.layout, self.parts = header.layout, header.parts
        self.scale, self.first_epoch = header.scale, header.first_epoch
        self.class_names, self.run = header.class_names, header.run
        self._logits = self._labels.column("label_logits", np.float32, self.layout.num_classes)
        self._noisy_class = self._labels.column("noisy_class", np.int32)
        self._pinned = self._labels.column("pinned", np.uint8)
        self._sample_key = self._labels.column("sample_key", np.uint8, width=16)
        self._last_epoch = self._ledger.column("last_epoch", np.int32)
        self._checks = RowChecks(folder, self.layout, self.parts, writable_parts)
        self._tracker = PartTracker(self._labels, self._ledger, restored)
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        folder: str | Path,
        noisy_class: ClassSource,
        class_names: Sequence[str],
        sample_keys: KeySource | None = None,
        scale: float = 10.0,
        run: str | None = None,
    ) -> "LabelTable":
        """Make a table in which every row's logits are scale * one-hot of its given class.

        Give arrays in row order, or iterators of chunks for tables larger than memory. A class of -1 means
        that the row has no usable label: its logits are zeros, no class preferred. Without keys the keys are
        zeros. `run` is the id under which snapshots are stored; a table made outside a run gets a new id.
        """
        folder, num_classes = Path(folder), len(class_names)
        if num_classes < 2:
            raise PencilError(f"{folder}: {num_classes} class names; labels need at least 2 classes")
        with named_storage_errors(folder):
            if (folder / LABELS_FILE).exists():
                raise PencilError(f"{folder}: holds a label table already; open it, or empty the folder")
            with made_folder(folder), new_columns(noisy_class, sample_keys, num_classes, folder) as columns:
                layout = Layout.of(len(columns[0]), num_classes)
                parts = tuple(range(layout.num_parts))
                header = TableHeader(layout, parts, 1, scale, tuple(class_names), run or new_id())
                rows_of_parts = [layout.rows_of(part) for part in parts]
                labels = (new_labels(rows, columns, num_classes, scale) for rows in rows_of_parts)
                write_working_copy(folder, header, labels, (new_ledger(len(rows)) for rows in rows_of_parts))
        return cls(folder, parts)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        writable_parts: Sequence[int] | Literal["all"] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> "LabelTable":
        """Map a working copy: for reading, or to write the parts named."""
        folder = Path(folder)
        if not (folder / LABELS_FILE).exists():
            raise PencilError(f"{folder}: no label table here; create it, or restore it from a manifest")
        with named_storage_errors(folder):
            table = cls(folder, ())
            _require_classes(str(folder), table.class_names, class_names)
            wanted = table.parts if writable_parts == "all" else tuple(writable_parts or ())
            if isinstance(writable_parts, str) and writable_parts != "all":
                allowed = "give a list of part numbers, 'all', or None to read"
                raise PencilError(f"{folder}: writable_parts is '{writable_parts}'; {allowed}")
            for part in set(wanted) - set(table.parts):
                raise PencilError(f"{folder}: part {part} is not in this working copy; restore it first")
            return cls(folder, wanted) if wanted else table

    @classmethod
    def restore(
        cls,
        manifest: Manifest,
        folder: str | Path,
        parts: Iterable[int] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> "LabelTable":
        """Make a writable working copy of a snapshot, or of some of its parts, checking every hash.

        A working copy already in the folder is replaced: that of a dead attempt is never trusted.
        """
        _require_classes(f"manifest over {manifest.store}", manifest.class_names, class_names)
        if parts is None:
            manifest.require_whole()
        held = tuple(sorted(manifest.parts if parts is None else set(parts)))
        for part in set(held) - set(manifest.parts):
            raise PencilError(f"manifest over {manifest.store}: has no part {part} to restore")
        identity = manifest.first_epoch, manifest.scale, manifest.class_names, manifest.run
        labels, ledger = (get_parts(manifest, held, kind) for kind in (LABELS_FOLDER, LEDGER_FOLDER))
        write_working_copy(Path(folder), TableHeader(manifest.layout, held, *identity), labels, ledger)
        return cls(Path(folder), held, manifest)

    @property
    def writable_parts(self) -> set[int]:
        """The parts open for writing."""
        return set(np.flatnonzero(self._checks.writable).tolist())

    def check_rows(self, rows: Int64s) -> Int64s:
        """Refuse rows that the table does not have; their parts may be held elsewhere."""
        return self._checks.known(rows)[0]

    def read(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The label logits of these rows, in their order: float32 [B, C]."""
        return self._get(self._logits, rows)

    def read_class(self, rows: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """The class each row was given, or pinned to; -1 where it has no usable label."""
        return self._get(self._noisy_class, rows)

    def read_pinned(self, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which of these rows are pinned."""
        return self._get(self._pinned, rows).astype(np.bool_)

    def read_key(self, rows: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """The 128-bit keys of these rows' sample ids: uint8 [B, 16]."""
        return self._get(self._sample_key, rows)

    def read_last_epoch(self, rows: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """The last epoch of the table's life in which each row was visited; 0: never."""
        return self._get(self._last_epoch, rows)

    def write(self, rows: npt.ArrayLike, logits: npt.ArrayLike, epoch: int) -> None:
        """Move these rows to new logits and mark them as visited; pinned rows are marked and stay.

        All rows are checked before any is written. Logits go first: a row marked with the epoch has moved.
        """
        rows, parts = self._checks.to_write(rows)
        logits = np.asarray(logits)
        if logits.dtype != np.float32:
            with np.errstate(over="ignore"):  # a number too large becomes infinite, and is refused
                logits = logits.astype(np.float32)
        expected = (len(rows), self.layout.num_classes)
        if logits.shape != expected:
            raise PencilError(f"{self.folder}: logits of shape {logits.shape}; expected {expected}")
        finite = np.isfinite(logits)
        if np.count_nonzero(finite) < logits.size:
            infinite = rows[~finite.all(axis=1)]
            self._checks.refuse_write(infinite, "given logits that are not finite numbers of 32 bits")
        with self._lock:
            marks = self._unvisited(rows, parts, epoch)
            pinned = self._pinned.get(self._pinned.find(rows, parts))
            if np.count_nonzero(pinned):
                free = pinned == 0
                self._set_logits(rows[free], parts[free], logits[free])
            else:
                self._set_logits(rows, parts, logits)
            self._mark(marks, parts, epoch)

    def mark(self, rows: npt.ArrayLike, epoch: int) -> None:
        """Mark these rows as visited, leaving their labels alone."""
        rows, parts = self._checks.to_write(rows)
        with self._lock:
            self._mark(self._unvisited(rows, parts, epoch), parts, epoch)

    def pin(self, rows: npt.ArrayLike, classes: npt.ArrayLike) -> None:
        """Set these rows' class for good: scale * one-hot, and no write moves them again."""
        rows, parts = self._checks.to_write(rows)
        if np.size(classes) != len(rows):
            raise PencilError(
                f"{self.folder}: {np.size(classes)} classes to pin {len(rows)} rows; give one each"
            )
        pinned = checked_classes(classes, self.layout.num_classes, lowest=0, rows=rows)
        with self._lock:
            self._noisy_class.set(self._noisy_class.find(rows, parts), pinned)
            self._pinned.set(self._pinned.find(rows, parts), 1)
            self._set_logits(rows, parts, scaled_one_hot(pinned, self.layout.num_classes, self.scale))

    def visited(self, epoch: int) -> npt.NDArray[np.bool_]:
        """Which rows of the whole table were last visited in this epoch: bool [N]."""
        if not self._checks.held.all():
            raise PencilError(
                f"{self.folder}: holds {len(self.parts)} of {self.layout.num_parts} parts, not every row; "
                "use count_visited, or manifest.visited with a complete manifest"
            )
        return np.concatenate([np.zeros(0, np.bool_), *self._marks_of(epoch)])

    def count_visited(self, epoch: int) -> int:
        """How many rows of the parts held here were last visited in this epoch."""
        return sum(int(np.count_nonzero(marks)) for marks in self._marks_of(epoch))

    def snapshot(self, store: str | Path) -> Manifest:
        """Write the parts that moved to the store, and name the parts in a manifest of this moment.

        It names the parts open for writing, since another process may be writing the others; for a table
        opened for reading, all it holds. Writes wait meanwhile. The manifest is not saved: with several ranks
        it is incomplete.
        """
        with self._lock:
            manifest = self._tracker.snapshot(store, sorted(self.writable_parts) or self.parts)
        self._labels.forget_pages()
        self._ledger.forget_pages()
        return manifest

    def _marks_of(self, epoch: int) -> Iterator[npt.NDArray[np.bool_]]:
        for part in self.parts:
            yield self._ledger.batch(part).column("last_epoch").to_numpy() == self.first_epoch + epoch

    def _get(self, column: Column, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        found, parts = self._checks.to_read(rows)
        return column.get(column.find(found, parts))

    def _set_logits(self, rows: Int64s, parts: Int64s, logits: npt.NDArray[np.float32]) -> None:
        self._tracker.labels_moved[parts] = True
        self._logits.set(self._logits.find(rows, parts), logits)

    def _mark(self, marks: Int64s, parts: Int64s, epoch: int) -> None:
        self._tracker.ledger_moved[parts] = True
        self._last_epoch.set(marks, self.first_epoch + epoch)

    def _unvisited(self, rows: Int64s, parts: Int64s, epoch: int) -> Int64s:
        """The places of these rows in the ledger, none of them marked with this epoch or a later one."""
        if not 0 <= epoch <= LAST_EPOCH - self.first_epoch:
            raise PencilError(f"{self.folder}: epoch {epoch}; a run counts its epochs from 0")
        marks = self._last_epoch.find(rows, parts)
        last_epoch = self._last_epoch.get(marks)
        seen = last_epoch >= self.first_epoch + epoch
        if np.count_nonzero(seen):
            last = int(last_epoch[seen][0]) - self.first_epoch
            why = f"marked with epoch {last} already, written again in epoch {epoch}"
            self._checks.refuse_write(rows[seen], why)
        return marks


def _require_classes(name: str, found: Sequence[str], expected: Sequence[str] | None) -> None:
    if expected is not None and list(found) != list(expected):
        raise PencilError(
            f"{name}: the class list of these labels {difference(found, expected)}, compared with the one "
            "they are used with; use the class list the table was made with, or remap the table"
        )
