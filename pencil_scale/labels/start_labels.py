"""The labels a run starts with: every catalogue row at its given class, in the run's label store."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue import Catalogue
from pencil_scale.label_table import LabelTable
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import Pinned, apply_pins


def label_store(storage: str) -> str:
    """Where a dataset keeps the parts of all its label tables."""
    return f"{storage.rstrip('/')}/labels"


def start_labels(
    catalogue: Catalogue,
    storage: str,
    scale: float,
    scratch: str | None,
    pins: Pinned | None = None,
    run: str | None = None,
) -> Manifest:
    """Make a fresh table over all rows of the catalogue and put it into the label store.

    A row without a usable class has one all the same, with no class preferred: rows keep their numbers.
    What people have pinned starts, and stays, as they decided.
    """
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pencil_scale-", dir=scratch) as folder:
        table = fresh_table(catalogue, folder, scale, run)
        if pins is not None:
            apply_pins(table, pins)
        return replace(table.snapshot(label_store(storage)), catalogue=catalogue.id)


def fresh_table(catalogue: Catalogue, folder: str, scale: float = 10.0, run: str | None = None) -> LabelTable:
    """Make a table in which every row of the catalogue has the class it was given."""
    keys, classes = _keys(catalogue), _classes(catalogue)
    return LabelTable.create(Path(folder) / "table", classes, catalogue.class_names, keys, scale, run)


def _classes(catalogue: Catalogue) -> Iterator[npt.NDArray[np.int32]]:
    for table in catalogue.batches(["noisy_class"]):
        yield table["noisy_class"].fill_null(-1).to_numpy()


def _keys(catalogue: Catalogue) -> Iterator[pa.Array]:
    for table in catalogue.batches(["sample_key"]):
        yield table["sample_key"].combine_chunks()
