"""Row checks: which rows a working copy has, and which of them may be written.

They run on every batch, so they are written for speed: on arrays this small `count_nonzero` and `argmax` are
several times faster than `any`, `all` and `max`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pencil_scale.labels.part_files import Int64s, Layout, RowsRefusedError


class RowChecks:
    """Turns what a caller gives into row numbers that are safe to use, or refuses them by name."""

    def __init__(self, folder: Path, layout: Layout, held: Iterable[int], writable: Iterable[int]):
        self._folder, self._num_rows, self._shift = folder, layout.num_rows, layout.shift
        self.held, self.writable = (np.zeros(layout.num_parts, np.bool_) for _ in range(2))
        self.held[list(held)] = True
        self.writable[list(writable)] = True

    def known(self, rows: npt.ArrayLike, writing: bool = False) -> tuple[Int64s, Int64s]:
        """These rows as an array, and the part of each; the part may be held elsewhere."""
        found = np.asarray(rows)
        if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
            raise RowsRefusedError(
                f"rows of type {found.dtype}, shape {found.shape}; give a list of row numbers"
            )
        given, found = found, found.astype(np.int64, copy=False)
        unsigned = found.view(np.uint64)  # a negative row is a huge one
        if found.size and unsigned.item(unsigned.argmax()) >= self._num_rows:
            refuse = self.refuse_write if writing else self.refuse
            refuse(given[unsigned >= self._num_rows], f"outside the table's {self._num_rows:,} rows")
        return found, found >> self._shift

    def to_write(self, rows: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The same, for distinct rows whose parts are open for writing."""
        found, parts = self.known(rows, writing=True)
        writable = self.writable[parts]
        if np.count_nonzero(writable) < len(found):
            self.refuse_write(found[~writable], "in a part that was not opened for writing")
        ordered = np.sort(found)
        repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(repeated):
            self.refuse_write(ordered[1:][repeated], "given twice in one write")
        return found, parts

    def refuse_absent(self, rows: Int64s, parts: Int64s) -> NoReturn:
        """Name the rows whose parts are not here."""
        self.refuse(rows[~self.held[parts]], "in a part that is not in this working copy")

    def refuse(self, rows: npt.NDArray[Any], why: str) -> NoReturn:
        """Name the first of these rows, as it was given, and why it cannot be."""
        others = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise RowsRefusedError(f"{self._folder}: row {rows[0]}{others}: {why}")

    def refuse_write(self, rows: npt.NDArray[Any], why: str) -> NoReturn:
        """The same, where somebody may wonder whether the other rows were written."""
        self.refuse(rows, f"{why}; nothing was written")
