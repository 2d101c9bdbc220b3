"""Carry over: the labels of one night become those that the next one starts with.

Every known row keeps its logits bit for bit, whatever shard it is in now. New rows start as given; rows whose
given class has changed start again; pins that people made since then come last. A row that was pinned to a
class that has left the list gets the class that the catalogue gives it.

    labels = carry_over(parent_manifest, crawl, catalogue, mapping, pins, run=night.id, scratch=None)
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import Pinned
from pencil_scale.labels.report import START, history_file, study_labels
from pencil_scale.labels.start_labels import grow, pin, regive, release, remap
from pencil_scale.labels.table import LabelTable
from pencil_scale.nights.crawl import Classes, Crawl, new_numbers
from pencil_scale.storage.errors import PencilError

STRETCH = 1 << 18


def carry_over(
    parent: Manifest,
    crawl: Crawl,
    after: Catalogue,
    mapping: Classes,
    pins: Pinned,
    run: str,
    scratch: str | None,
) -> Manifest:
    """Make the labels that a night starts with, in the parent's store, under the id of the night's run."""
    if parent.layout.num_rows != crawl.first_row:
        raise PencilError(
            f"labels over {parent.layout.num_rows:,} rows, the catalogue of their night has "
            f"{crawl.first_row:,}; promote another night"
        )
    labels = parent.for_new_run(run)
    if labels.class_names != after.class_names:
        labels = _remapped(labels, mapping, after, scratch)
    if after.num_rows > crawl.first_row:
        classes = (column.fill_null(-1).to_numpy() for column in _new(after, crawl.first_row, "noisy_class"))
        keys = (column.combine_chunks() for column in _new(after, crawl.first_row, "sample_key"))
        labels = grow(labels, classes, keys)
    labels = regive(labels, crawl.regiven["row"].to_numpy(), crawl.regiven["class"].to_numpy())
    void = np.sort(pins.void["row"].to_numpy())
    return release(pin(labels, pins), void, _given(after, void))


def write_start(labels: Manifest, catalogue: Catalogue, folder: str) -> None:
    """Keep every label as it was before a night: the history of a night shows only its own changes."""
    with history_file(f"{folder}/{START}") as writer:
        study_labels(labels, catalogue, history=writer)


def _remapped(labels: Manifest, mapping: Classes, after: Catalogue, scratch: str | None) -> Manifest:
    """The only step that reads every label: a new class list changes the width of all of them."""
    with tempfile.TemporaryDirectory(prefix="pencil_scale-", dir=scratch) as folder:
        table = LabelTable.restore(labels, Path(folder) / "old")
        rows = np.arange(table.layout.num_rows)
        numbers = np.array(new_numbers(mapping, table.layout.num_classes))
        freed = rows[table.read_pinned(rows) & (numbers[table.read_class(rows)] < 0)]
        remapped = remap(table, mapping, after.class_names, Path(folder) / "new").snapshot(labels.store)
    return regive(replace(remapped, catalogue=labels.catalogue), freed, _given(after, freed))


def _given(catalogue: Catalogue, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The classes that the catalogue gives some rows; -1 if it gives none."""
    found = [catalogue.read(row, row + 1, ["noisy_class"])["noisy_class"][0].as_py() for row in rows.tolist()]
    return np.array([-1 if number is None else number for number in found], np.int32)


def _new(catalogue: Catalogue, first_row: int, column: str) -> Iterator[pa.ChunkedArray]:
    """A column of the new rows, some at a time."""
    for first in range(first_row, catalogue.num_rows, STRETCH):
        yield catalogue.read(first, min(first + STRETCH, catalogue.num_rows), [column])[column]
