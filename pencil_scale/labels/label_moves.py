"""Label moves: in which epoch each label's class last changed, from a run's history files.

moves = LabelMoves("s3://lake/clothing1m/labels/history/night-12", num_parts=64)
moves.last_change(part=3, given=noisy_class)        # int32, -1 where the class did not change in this run
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.reading.byte_source import filesystem_of

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
        raise TableDamagedError(f"{name}: no whole history file ({reason}); remove it") from error


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
