"""History: what the labels of a run were after each epoch that moved labels.

A run may write `epoch-NNNNN.arrow` after each such epoch (`pencil_scale.labels.report`), with the class and
the confidence of every row. A night also writes `start.arrow`, the labels it started from.

    moves = LabelMoves("s3://lake/clothing1m/labels/history/ID", layout)
    moves.last_change(range(0, 1000), given)     # int32: the epoch in which each row got its class, or -1
    traces = read_traces(published, rows)        # rows in rising order; of a long run at most `most` epochs
    traces.epochs, traces.classes, traces.confidence             # [E], [B, E], [B, E]

A history of a table of another shape is ignored.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.part_files import Int64s, Layout
from pencil_scale.labels.published import Published
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.urls import filesystem_of

NEVER = -1
START = "start.arrow"  # the labels a night started from, where they were not those given
_EPOCH = re.compile(r"epoch-(\d+)\.arrow$")


class LabelMoves:
    """In which epoch each label's class last changed; known only if the run kept a history."""

    def __init__(self, folder: str, layout: Layout) -> None:
        self._filesystem, path = filesystem_of(folder)
        self._files = history_files(folder)
        self._start = f"{path}/{START}" if self._filesystem.exists(f"{path}/{START}") else None
        self._layout = layout

    def last_change(self, rows: range, given: Int64s) -> npt.NDArray[np.int32]:
        """The run's epoch in which each of these rows got the class it has; -1 where it was given it."""
        numbers = np.arange(rows.start, rows.stop)
        last = np.full(len(rows), NEVER, np.int32)
        before = given if self._start is None else self._classes(self._start, numbers)
        for epoch, name in self._files:
            now = self._classes(name, numbers)
            if now is None or before is None:
                return np.full(len(rows), NEVER, np.int32)
            last[now != before] = epoch
            before = now
        return last

    def _classes(self, name: str, rows: Int64s) -> npt.NDArray[np.uint16] | None:
        found = _read(self._filesystem, name, self._layout, rows)
        return None if found is None else found[0]


@dataclass(frozen=True)
class Traces:
    """What the labels of some rows were after each epoch; no epochs where no history was kept."""

    epochs: tuple[int, ...]  # of the run, from 0
    classes: npt.NDArray[np.uint16]
    confidence: npt.NDArray[np.float16]


def read_traces(published: Published, rows: Int64s, most: int | None = None) -> Traces:
    """Read the history of a run for some rows of its label table, in rising order."""
    filesystem, _ = filesystem_of(published.history)
    files = history_files(published.history)
    if most is not None:  # evenly spread, with the first and the last
        places = np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int)
        files = [files[place] for place in np.unique(places)]
    found = [(epoch, _read(filesystem, name, published.manifest.layout, rows)) for epoch, name in files]
    known = [(epoch, labels) for epoch, labels in found if labels is not None]
    classes = np.array([labels[0] for _, labels in known], np.uint16).reshape(len(known), len(rows))
    confidence = np.array([labels[1] for _, labels in known], np.float16).reshape(len(known), len(rows))
    return Traces(tuple(epoch for epoch, _ in known), classes.T, confidence.T)


def history_files(folder: str) -> list[tuple[int, str]]:
    """The epochs of a run's history in rising order, and the file of each; none if it kept no history."""
    filesystem, path = filesystem_of(folder)
    filesystem.invalidate_cache()
    try:
        names = filesystem.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), name) for name in names if (match := _EPOCH.search(name)))


def _read(
    filesystem: Any, name: str, layout: Layout, rows: Int64s
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float16]] | None:
    """Classes and confidences of rows in one file; None for a table of another shape."""
    classes, confidence = np.zeros(len(rows), np.uint16), np.zeros(len(rows), np.float16)
    parts = rows >> layout.shift
    try:
        with filesystem.open(name, "rb") as file:
            reader = pa.ipc.open_file(file)
            if reader.num_record_batches != layout.num_parts:
                return None
            for part in np.unique(parts).tolist():
                here = slice(*np.searchsorted(parts, [part, part + 1]))
                batch, slots = reader.get_batch(part), rows[here] - layout.rows_of(part).start
                if batch.num_rows != len(layout.rows_of(part)):
                    return None
                classes[here] = batch.column("class").to_numpy()[slots]
                confidence[here] = batch.column("confidence").to_numpy()[slots]
    except pa.ArrowInvalid as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{name}: damaged history file ({reason}); remove it") from error
    return classes, confidence
