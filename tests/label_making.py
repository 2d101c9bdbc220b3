"""Label tables for tests: made of a list of classes, without a catalogue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import PINS, Pinned
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.labels.start_labels import append, pin
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.evidence import Predictions
from pencil_scale.storage.errors import sample_key


def predicted(rows: npt.ArrayLike, num_classes: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """What a network would predict of rows of class `row % num_classes`, packed: [B, 2 K]."""
    rows = np.asarray(rows)
    class_logits = np.sin(rows[:, None] * 1.7 + np.arange(num_classes) * 2.9 + seed) * 6
    return packed(class_logits)


def packed(class_logits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Predictions as a step packs them, [B, 2 K]; worked out without torch."""
    found = Predictions.from_logits(class_logits)
    return np.concatenate([found.classes, found.log_p], 1, dtype=np.float32)


def names(num_classes: int) -> tuple[str, ...]:
    return tuple(f"class-{number}" for number in range(num_classes))


def keys_of(rows: range) -> pa.Array:
    """Keys of samples that are named like their rows."""
    return pa.array([sample_key(str(row)) for row in rows], pa.binary(16))


def new_labels(
    store: str | Path, noisy_class: npt.ArrayLike, class_names: Any, keys: Any = None, **options: Any
) -> Manifest:
    """Labels in which every row has the class it was given."""
    return append(Manifest.empty(store, class_names, **options), noisy_class, keys)


def pin_rows(manifest: Manifest, classes: Mapping[int, int]) -> Manifest:
    """Pin these rows to these classes."""
    rows = np.array(sorted(classes), np.int64)
    keys = PublishedLabels(manifest).rows(range(manifest.layout.num_rows)).sample_key[rows]
    return pin(manifest, Pinned(rows, keys, np.array([classes[row] for row in rows]), PINS.empty_table()))


def new_table(
    folder: Path,
    noisy_class: npt.ArrayLike,
    class_names: Any,
    store: str | Path | None = None,
    pins: Mapping[int, int] | None = None,
    **options: Any,
) -> LabelTable:
    """A working copy of new labels."""
    labels = new_labels(store or folder / "store", noisy_class, class_names, **options)
    return LabelTable.restore(pin_rows(labels, pins or {}), folder)
