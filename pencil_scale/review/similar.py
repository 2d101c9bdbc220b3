"""Similar samples on the review page: outliers, and for each sample those most like it.

rows = rows_to_add(results, listed, num_outliers=200, num_similar=1000)
found = similar_of(results, rows_of_the_page)
found.places, found.is_outlier, found.score                        # in the order of these rows
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.features.neighbours import NONE
from pencil_scale.features.similar import NEIGHBOURS, Results

Int64s = npt.NDArray[np.int64]


class Similar(NamedTuple):
    """What similarity says about the samples of a page."""

    places: Int64s  # [samples, NEIGHBOURS], of the most similar samples of the page; -1: no more
    is_outlier: npt.NDArray[np.bool_]
    score: npt.NDArray[np.float32]


def rows_to_add(results: Results, listed: Int64s, num_outliers: int, num_similar: int) -> Int64s:
    """The first outliers, and the neighbours of listed samples, the first of them first; not the listed."""
    outliers = results.where(pc.field("is_outlier"), ["row", "outlier_score"])
    outliers = outliers.sort_by([("outlier_score", "descending"), ("row", "ascending")])
    first = outliers["row"].to_numpy()
    first = first[~np.isin(first, listed)][:num_outliers]
    neighbours = _neighbours(results, listed)
    found, at = np.unique(neighbours[neighbours != NONE], return_index=True)
    found = found[np.argsort(at, kind="stable")]
    found = found[~np.isin(found, np.r_[listed, first])][:num_similar]
    return np.sort(np.r_[first, found])


def similar_of(results: Results, rows: Int64s) -> Similar:
    """Look up the samples of a page by their rows."""
    order = np.argsort(rows, kind="stable")
    neighbours = _neighbours(results, rows)
    at = np.minimum(np.searchsorted(rows[order], neighbours), max(len(rows) - 1, 0))
    places = np.where(rows[order][at] == neighbours, order[at], NONE) if len(rows) else neighbours
    entries = results.where(pc.field("row").isin(pa.array(rows)), ["row", "is_outlier", "outlier_score"])
    here = pc.index_in(pa.array(rows), entries["row"].combine_chunks())
    is_outlier, score = (entries[name].take(here) for name in ("is_outlier", "outlier_score"))
    return Similar(
        places,
        is_outlier.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_),
        score.fill_null(0.0).to_numpy(),
    )


def _neighbours(results: Results, rows: Int64s) -> Int64s:
    """The neighbours of some rows, [rows, NEIGHBOURS]; -1: no more."""
    entries = results.where(pc.field("row").isin(pa.array(rows)), ["row", "neighbours"])
    known = dict(zip(entries["row"].to_pylist(), entries["neighbours"].to_pylist(), strict=True))
    found = np.full((len(rows), NEIGHBOURS), NONE, np.int64)
    for number, row in enumerate(rows.tolist()):
        some = known.get(row, [])
        found[number, : len(some)] = some
    return found
