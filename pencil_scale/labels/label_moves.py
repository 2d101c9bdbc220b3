"""Label moves: in which epoch each label's class last changed, from a run's history files.

moves = LabelMoves("s3://lake/clothing1m/labels/history/night-12", num_parts=64)
moves.last_change(part=3, given=noisy_class)        # int32, -1 where the class never left the given one
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.reading.byte_source import filesystem_of

NEVER = -1
_EPOCH = re.compile(r"epoch-(\d+)\.arrow$")


class LabelMoves:
    """The history of one run; a history of another layout, or none, tells nothing."""

    def __init__(self, folder: str, num_parts: int) -> None:
        self._filesystem, path = filesystem_of(folder)
        self._filesystem.invalidate_cache()
        try:
            names = self._filesystem.ls(path, detail=False)
        except FileNotFoundError:
            names = []
        found = {int(match[1]): name for name in names if (match := _EPOCH.search(name))}
        self._files = sorted(found.items())
        self._num_parts = num_parts

    @property
    def is_known(self) -> bool:
        """Whether the run kept a history."""
        return bool(self._files)

    def last_change(self, part: int, given: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The run's epoch in which each row of a part came to the class it has."""
        last = np.full(len(given), NEVER, np.int32)
        before = given
        for epoch, name in self._files:
            now = self._classes(name, part)
            if now is None or len(now) != len(given):
                return np.full(len(given), NEVER, np.int32)
            last[now != before] = epoch
            before = now
        return last

    def _classes(self, name: str, part: int) -> npt.NDArray[np.int64] | None:
        with self._filesystem.open(name, "rb") as file:
            reader: Any = pa.ipc.open_file(file)
            if reader.num_record_batches != self._num_parts:
                return None
            classes: npt.NDArray[np.int64] = (
                reader.get_batch(part).column("class").to_numpy().astype(np.int64)
            )
        return classes
