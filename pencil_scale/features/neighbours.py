"""Neighbours: the images most similar to each image, and the groups of near-duplicates, by their features.

Similarity is the cosine between two feature vectors; if a row has several views, of their mean. Rows with
equal features are one vector, so ten thousand copies of an image cost as much as one. Up to some 100,000
vectors, all pairs are compared in blocks. Beyond that an index of faiss proposes candidates, and only their
similarity is computed.

    vectors = Vectors.of(table, rows)                       # the distinct vectors of these rows
    found = compare_all(vectors, k=12, threshold=0.92, report=print)
    found = compare_indexed(vectors, k=12, threshold=0.92, report=print)
    found.similarity, found.places                          # [distinct, k], the most similar first; -1: none
    found.groups                                            # [distinct], equal for near-duplicates
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pencil_scale.features.table import FeatureTable
from pencil_scale.storage.errors import PencilError

BLOCK = 2048  # vectors; two blocks have 16 MiB of similarities
NONE = -1
# The index: vectors are reduced to their first principal components, and divided into lists.
COMPONENTS, PROBES = 128, 16
PCA_ROWS, ROWS_PER_LIST = 20_000, 40  # to train it with
SPARE = 8  # candidates beyond the wanted number, as their order is not exact
GATHERED = 512  # vectors whose candidates are compared at once

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Report = Callable[[int, int], None]  # how many vectors are done, of how many


@dataclass(frozen=True)
class Vectors:
    """The distinct feature vectors of some rows of a table."""

    table: FeatureTable
    rows: Int64s  # all rows, in ascending order
    place: Int64s  # of each row: which vector it has
    first_rows: Int64s  # of each vector: the first row that has it
    norms: Float32s

    def __len__(self) -> int:
        return len(self.first_rows)

    @classmethod
    def of(cls, table: FeatureTable, rows: Int64s) -> "Vectors":
        """Find equal vectors by their hash."""
        keys = [
            hashlib.blake2b(one.data, digest_size=16).digest()
            for some in _blocks(rows)
            for one in table.features[some]
        ]
        _, firsts, place = np.unique(np.array(keys, "S16"), return_index=True, return_inverse=True)
        order = np.argsort(firsts, kind="stable")  # vectors in the order of their first rows
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        firsts = firsts[order]
        norms = [np.linalg.norm(_mean(table.features[rows[some]]), axis=1) for some in _blocks(firsts)]
        return cls(table, rows, rank[place], rows[firsts], np.concatenate([np.zeros(0, np.float32), *norms]))

    def read(self, places: Int64s | slice) -> Float32s:
        """Vectors of length 1, [places, dimension]; a vector of zeros stays one."""
        found = _mean(self.table.features[self.first_rows[places]])
        found /= np.maximum(self.norms[places], np.float32(1e-12))[:, None]
        return found


def _blocks(values: Int64s) -> list[Int64s]:
    return [values[first : first + BLOCK] for first in range(0, len(values), BLOCK)]


def _mean(features: npt.NDArray[np.float16]) -> Float32s:
    """The mean of the views."""
    wide = features.astype(np.float32)
    return wide[:, 0] if wide.shape[1] == 1 else wide.mean(1)


class Neighbours:
    """The most similar vectors found so far, and groups of those above the threshold."""

    def __init__(self, num: int, k: int, threshold: float) -> None:
        self.similarity = np.full((num, k), -2.0, np.float32)
        self.places = np.full((num, k), NONE, np.int64)
        self.groups: Int64s = np.arange(num)
        self._threshold = threshold

    def add(self, first: int, similarity: Any, places: Int64s | int) -> None:
        """Add similarities [rows, others] of rows to others, given the places of these, or the first one."""
        import torch

        rows, k = slice(first, first + len(similarity)), self.places.shape[1]
        best, chosen = (
            one.numpy() for one in torch.from_numpy(similarity).topk(min(k, similarity.shape[1]), 1)
        )
        others = chosen + places if isinstance(places, int) else np.take_along_axis(places, chosen, 1)
        best, others = np.hstack([self.similarity[rows], best]), np.hstack([self.places[rows], others])
        order = np.argsort(-best, axis=1, kind="stable")[:, :k]
        self.similarity[rows] = np.take_along_axis(best, order, 1)
        self.places[rows] = np.where(self.similarity[rows] > -2.0, np.take_along_axis(others, order, 1), NONE)

    def join(self, first: Int64s, second: Int64s) -> None:
        """Make one group of every pair and all that they are joined with."""
        one, other = self.groups[first], self.groups[second]
        differ = one != other
        if differ.any():
            pairs, num = (one[differ], other[differ]), len(self.groups)
            graph = coo_matrix((np.ones(len(pairs[0]), np.bool_), pairs), shape=(num, num))
            self.groups = connected_components(graph, directed=False)[1].astype(np.int64)[self.groups]

    def join_similar(self, first: int, similarity: Float32s, places: Int64s | int) -> None:
        """Join all pairs of a block that are similar enough."""
        row, other = np.nonzero(similarity >= self._threshold)
        self.join(row + first, other + places if isinstance(places, int) else places[row, other])


def compare_all(vectors: Vectors, k: int, threshold: float, report: Report) -> Neighbours:
    """Compare every pair once, a block with a block; exact."""
    found, num = Neighbours(len(vectors), k, threshold), len(vectors)
    for first in range(0, num, BLOCK):
        here = vectors.read(slice(first, first + BLOCK))
        for second in range(first, num, BLOCK):
            there = here if second == first else vectors.read(slice(second, second + BLOCK))
            similarity = here @ there.T
            if second == first:
                np.fill_diagonal(similarity, -2.0)
            found.join_similar(first, similarity, second)
            found.add(first, similarity, second)
            if second > first:
                found.add(second, np.ascontiguousarray(similarity.T), first)
        # The first blocks are compared with more others than the last ones.
        left = (num - first - len(here)) / num
        report(round(num * (1 - left * left)), num)
    return found


def compare_indexed(vectors: Vectors, k: int, threshold: float, report: Report) -> Neighbours:
    """Compare every vector with the candidates that an index proposes; a few neighbours may be missed."""
    found, num = Neighbours(len(vectors), k, threshold), len(vectors)
    index, reduced = _index(vectors)
    for first in range(0, num, GATHERED):
        places = np.arange(first, min(first + GATHERED, num))
        _, others = index.search(reduced[places], k + SPARE)
        others = np.where(others == places[:, None], NONE, others)  # not itself
        there = vectors.read(others.ravel()).reshape(*others.shape, -1)  # of none: any vector
        similarity = np.matmul(there, vectors.read(places)[:, :, None])[:, :, 0]
        similarity[others == NONE] = -2.0
        found.join_similar(first, similarity, others)
        found.add(first, similarity, others)
        if first // GATHERED % 16 == 0 or places[-1] == num - 1:
            report(int(places[-1]) + 1, num)
    return found


def _index(vectors: Vectors) -> tuple[Any, Float32s]:
    """Build an index of all vectors, and return it with the reduced vectors that it compares."""
    faiss, num = load_faiss(), len(vectors)
    sample = np.random.default_rng(1).permutation(num)
    some = vectors.read(np.sort(sample[:PCA_ROWS]))
    width = min(COMPONENTS, some.shape[1])
    axes = np.linalg.eigh(some.T @ some)[1][:, -width:]  # faiss takes half a minute for this
    reduced = np.empty((num, width), np.float32)
    for first in range(0, num, BLOCK):
        reduced[first : first + BLOCK] = vectors.read(slice(first, first + BLOCK)) @ axes
    num_lists = max(1, min(2 ** round(np.log2(4 * np.sqrt(num))), num // ROWS_PER_LIST))
    index = faiss.index_factory(width, f"IVF{num_lists},SQfp16", faiss.METRIC_L2)
    index.train(reduced[np.sort(sample[: ROWS_PER_LIST * num_lists])])
    for first in range(0, num, BLOCK):
        index.add(reduced[first : first + BLOCK])
    index.nprobe = PROBES
    return index, reduced


def load_faiss() -> Any:
    """Import faiss, which is optional."""
    try:
        import faiss
    except ImportError as error:
        raise PencilError(
            "faiss is not installed, which finds similar images among more than features.exact_rows of them: "
            "pip install 'pencil_scale[index]', or raise features.exact_rows (the time grows with its square)"
        ) from error
    return faiss
