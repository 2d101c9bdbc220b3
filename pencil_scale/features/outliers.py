"""Outliers: images that belong to no class, by the cosine distance of their features to the nearest class.

A class is the mean of its vectors, by the given labels; wrong labels hardly move it. Vectors beyond the
threshold are left out and the means are computed again, until nothing changes, so that many outliers do not
hide each other. The threshold is the median plus 2.5 standard deviations of the root of the score, which is
about the angle; its lower quarter gives the deviation, as that of a normal distribution, so that outliers do
not raise it. Some images that are all right are above it.

On photos of clothing with other pictures among them this finds more than the distance to the nearest
neighbours, to which outliers that look alike seem normal, and than Mahalanobis distances.

    scores, threshold = outlier_scores(vectors, classes)     # of each vector; classes: -1 without a label
"""

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_matrix

from pencil_scale.features.neighbours import BLOCK, Float32s, Int64s, Vectors

DEVIATIONS = 2.5
NORMAL_QUARTER = 0.6745  # how many standard deviations the lower quarter of a normal distribution is below
FEWEST = 50  # vectors with a label: fewer say nothing about a threshold
FITTED = 1 << 16  # vectors that give means and threshold: 320 MiB of 1,280 numbers
MOST_ROUNDS = 20


def outlier_scores(vectors: Vectors, classes: Int64s) -> tuple[Float32s, float]:
    """Score every vector from 0 (the mean of a class) to 2; scores above the threshold are outliers."""
    centres, threshold = _fit(vectors, classes)
    scores = [
        _distance(vectors.read(slice(first, first + BLOCK)), centres)
        for first in range(0, len(vectors), BLOCK)
    ]
    return np.concatenate([np.zeros(0, np.float32), *scores]), threshold


def _fit(vectors: Vectors, classes: Int64s) -> tuple[Float32s, float]:
    """Find the means of the classes and the threshold, from equally many vectors of each class."""
    places = _sample(classes)
    if len(places) < FEWEST:
        return np.zeros((1, vectors.table.manifest.dimension), np.float32), 2.0
    units = np.concatenate(
        [vectors.read(places[first : first + BLOCK]) for first in range(0, len(places), BLOCK)]
    )
    numbers = np.unique(classes[places], return_inverse=True)[1]
    kept, threshold = np.ones(len(units), np.bool_), 2.0
    for _ in range(MOST_ROUNDS):
        members = coo_matrix((kept.astype(np.float32), (numbers, np.arange(len(units)))))
        sums = members @ units
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.float32(1e-12))
        scores = _distance(units, centres)
        quarter, median = np.quantile(np.sqrt(scores[kept]), [0.25, 0.5])
        threshold = float(median + DEVIATIONS * (median - quarter) / NORMAL_QUARTER) ** 2
        before, kept = kept, scores <= threshold
        if np.array_equal(before, kept):
            break
    return centres, threshold


def _sample(classes: Int64s) -> Int64s:
    """Draw vectors with a label: all, or about equally many of each class."""
    places = np.random.default_rng(1).permutation(np.flatnonzero(classes >= 0))
    if len(places) <= FITTED:
        return np.sort(places)
    order = places[np.argsort(classes[places], kind="stable")]
    starts = np.flatnonzero(np.r_[True, np.diff(classes[order]) != 0])
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    return np.sort(order[np.argsort(turn, kind="stable")[:FITTED]])


def _distance(units: Float32s, centres: Float32s) -> Float32s:
    """The cosine distance to the nearest mean."""
    nearest: npt.NDArray[np.float32] = np.maximum(1 - (units @ centres.T).max(1), 0)
    return nearest
