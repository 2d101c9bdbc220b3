"""Label moves: in which epoch each label's class last changed, from a run's history files.

moves = LabelMoves("s3://lake/clothing1m/labels/history/night-12", num_parts=64)
moves.last_change(part=3, given=noisy_class)        # int32, -1 where the class did not change in this run

Label traces: how the labels of some rows moved, epoch by epoch, from a run's history files.

traces = read_traces(published, rows)            # rows rising; of a long run at most `most` epochs
traces.epochs, traces.classes, traces.confidence             # [E], [B, E], [B, E]
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.part_files import Layout
from pencil_scale.labels.published import Published
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.urls import filesystem_of

NEVER = -1
START = "start.arrow"  # the labels that a run began with which were not those given
_EPOCH = re.compile(r"epoch-(\d+)\.arrow$")


def history_files(folder: str) -> list[tuple[int, str]]:
    """The epochs of which a run kept its labels, rising, and the file of each; none if it kept no history."""
    filesystem, path = filesystem_of(folder)
    filesystem.invalidate_cache()
    try:
        names = filesystem.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), name) for name in names if (match := _EPOCH.search(name)))


@contextmanager
def open_history(filesystem: Any, name: str) -> Iterator[Any]:
    """Open the history of one epoch, one record batch a part of the label table."""
    try:
        with filesystem.open(name, "rb") as file:
            yield pa.ipc.open_file(file)
    except pa.ArrowInvalid as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{name}: no whole history file ({reason}); remove it") from error


class LabelMoves:
    """The history of one run; a history of another layout, or none, tells nothing."""

    def __init__(self, folder: str, num_parts: int) -> None:
        self._filesystem, path = filesystem_of(folder)
        self._files = history_files(folder)
        self._start = f"{path}/{START}" if self._filesystem.exists(f"{path}/{START}") else None
        self._num_parts = num_parts

    @property
    def is_known(self) -> bool:
        """Whether the run kept a history."""
        return bool(self._files)

    def last_change(self, part: int, given: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The run's epoch in which each row of a part came to the class it has."""
        last = np.full(len(given), NEVER, np.int32)
        before = given if self._start is None else self._classes(self._start, part)
        for epoch, name in self._files:
            now = self._classes(name, part)
            if now is None or before is None or not len(now) == len(before) == len(given):
                return np.full(len(given), NEVER, np.int32)
            last[now != before] = epoch
            before = now
        return last

    def _classes(self, name: str, part: int) -> npt.NDArray[np.int64] | None:
        with open_history(self._filesystem, name) as reader:
            if reader.num_record_batches != self._num_parts:
                return None
            classes: npt.NDArray[np.int64] = (
                reader.get_batch(part).column("class").to_numpy().astype(np.int64)
            )
        return classes


@dataclass(frozen=True)
class Traces:
    """What the labels of some rows were after each epoch; no epochs where no history was kept."""

    epochs: tuple[int, ...]  # of the run, from 0
    classes: npt.NDArray[np.uint16]
    confidence: npt.NDArray[np.float16]


def read_traces(published: Published, rows: npt.NDArray[np.int64], most: int | None = None) -> Traces:
    """Read the history of a run for rows, rising, that its label table has."""
    filesystem, _ = filesystem_of(published.history)
    files = history_files(published.history)
    kept = files if most is None else _spread(files, most)
    found = [_of_file(filesystem, name, published.manifest.layout, rows) for _, name in kept]
    told = [(epoch, one) for (epoch, _), one in zip(kept, found, strict=True) if one is not None]
    shape = (len(told), len(rows))
    classes, confidence = np.zeros(shape, np.uint16), np.zeros(shape, np.float16)
    for place, (_, (some_classes, some_confidence)) in enumerate(told):
        classes[place], confidence[place] = some_classes, some_confidence
    return Traces(tuple(epoch for epoch, _ in told), classes.T, confidence.T)


def _spread(files: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """Keep so many, evenly, the first and the last among them."""
    places = np.unique(np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int))
    return [files[place] for place in places]


def _of_file(filesystem: Any, name: str, layout: Layout, rows: npt.NDArray[np.int64]) -> Any:
    """Classes and confidences of the rows after one epoch; None of a table of another shape."""
    classes, confidence = np.zeros(len(rows), np.uint16), np.zeros(len(rows), np.float16)
    parts = rows >> layout.shift
    with open_history(filesystem, name) as reader:
        if reader.num_record_batches != layout.num_parts:
            return None
        for part in np.unique(parts).tolist():
            here = slice(*np.searchsorted(parts, [part, part + 1]))
            batch, slots = reader.get_batch(part), rows[here] - layout.rows_of(part).start
            if batch.num_rows != len(layout.rows_of(part)):
                return None
            classes[here] = batch.column("class").to_numpy()[slots]
            confidence[here] = batch.column("confidence").to_numpy()[slots]
    return classes, confidence
