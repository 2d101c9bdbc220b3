"""Carrying over: the labels of one night as those the next one begins with.

Every known row keeps its logits bit for bit, whatever shard it lies in now. New rows follow, as given; rows
that were given another class start again; what people pinned since is laid over all. A row that was pinned to
a class that has left the list gets the class the catalogue gives it.

    labels = carry_over(parent_manifest, crawl, catalogue, mapping, pins, run=plan.id, scratch=None)
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.history import START
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import Pinned
from pencil_scale.labels.report import history_file, study_labels
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
        labels = grow(labels, _classes(after, crawl.first_row), _keys(after, crawl.first_row))
    labels = regive(labels, crawl.regiven["row"].to_numpy(), crawl.regiven["class"].to_numpy())
    void = np.sort(pins.void["row"].to_numpy())
    return release(pin(labels, pins), void, _given(after, void))


def write_start(labels: Manifest, catalogue: Catalogue, folder: str) -> None:
    """Keep what every label was before a night: its history tells what changed in it, and nothing older."""
    with history_file(f"{folder}/{START}") as writer:
        study_labels(labels, catalogue, history=writer)


def _remapped(labels: Manifest, mapping: Classes, after: Catalogue, scratch: str | None) -> Manifest:
    """The one step that reads every label: another class list changes the width of all of them."""
    with tempfile.TemporaryDirectory(prefix="pencil_scale-", dir=scratch) as folder:
        table = LabelTable.restore(labels, Path(folder) / "old")
        rows = np.arange(table.layout.num_rows)
        numbers = np.array(new_numbers(mapping, table.layout.num_classes))
        freed = rows[table.read_pinned(rows) & (numbers[table.read_class(rows)] < 0)]
        remapped = remap(table, mapping, after.class_names, Path(folder) / "new").snapshot(labels.store)
    return regive(replace(remapped, catalogue=labels.catalogue), freed, _given(after, freed))


def _given(catalogue: Catalogue, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The classes that the catalogue gives some rows; -1 where it gives none."""
    found = [catalogue.read(row, row + 1, ["noisy_class"])["noisy_class"][0].as_py() for row in rows.tolist()]
    return np.array([-1 if number is None else number for number in found], np.int32)


def _classes(catalogue: Catalogue, first_row: int) -> Iterator[npt.NDArray[np.int32]]:
    for table in _new_rows(catalogue, first_row, "noisy_class"):
        yield table["noisy_class"].fill_null(-1).to_numpy()


def _keys(catalogue: Catalogue, first_row: int) -> Iterator[pa.Array]:
    for table in _new_rows(catalogue, first_row, "sample_key"):
        yield table["sample_key"].combine_chunks()


def _new_rows(catalogue: Catalogue, first_row: int, column: str) -> Iterator[pa.Table]:
    for first in range(first_row, catalogue.num_rows, STRETCH):
        yield catalogue.read(first, min(first + STRETCH, catalogue.num_rows), [column])
