"""Label traces: how the labels of some rows moved, epoch by epoch, from a run's history files.

traces = read_traces(published, rows)            # rows rising; of a long run at most `most` epochs
traces.epochs, traces.classes, traces.confidence             # [E], [B, E], [B, E]
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pencil_scale.labels.label_moves import history_files, open_history
from pencil_scale.labels.part_files import Layout
from pencil_scale.labels.published import Published
from pencil_scale.reading.byte_source import filesystem_of


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
