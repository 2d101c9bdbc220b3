"""A review page as large as they come: a thousand classes, a hundred thousand samples listed."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from pencil_scale.export.table import Words
from pencil_scale.labels.report import Traces
from pencil_scale.review.page import page_data, review_page
from pencil_scale.review.scan import SCORE_BINS, TRUTH_BINS, Cells, Tally
from pencil_scale.review.thumbnails import Thumbnails

NUM_EPOCHS = 10
TOP_K = 5


def large_page(path: Path, num_samples: int = 100_000, num_classes: int = 1000) -> Path:
    """Write the page; every sample is one that changed, and all are of random classes."""
    chance = np.random.default_rng(1)
    names = tuple(f"class of things number {number}" for number in range(num_classes))
    given = chance.integers(0, num_classes, num_samples)
    suggested = (given + 1 + (chance.pareto(0.4, num_samples) % (num_classes - 1)).astype(int)) % num_classes
    table = _table(given, suggested, chance)
    kept = np.arange(num_classes)
    transitions = Cells.of(np.r_[given, kept], np.r_[suggested, kept], np.r_[np.ones_like(given), kept + 100])
    counts = Counter(labels=1_300_000, changed=num_samples, learned_changed=num_samples, rows=1_300_000)
    none = Cells.of(given[:0], given[:0])
    scores = np.full((2, SCORE_BINS), 1000)
    known = np.array([[100.0], [0.9], [0.8]]) * [np.ones(TRUTH_BINS), *2 * [np.arange(5, 105, 10.0)]]
    tally = Tally(
        counts, transitions, none, scores, none, table, table.slice(0, 400), known, added=table.slice(0, 0)
    )
    moves = (chance.random((num_samples, NUM_EPOCHS)) < 0.5).cumsum(1) > 2
    classes = np.where(moves, suggested[:, None], given[:, None]).astype(np.uint16)
    traces = Traces(tuple(range(NUM_EPOCHS)), classes, chance.random(classes.shape).astype(np.float16))
    words = Words(names, ("s3://crawl/0.tar",), 7, "large", TOP_K)
    data = page_data(words, tally, traces, Thumbnails(), [])
    path.write_text(review_page(data, "large", created="2026-01-01", catalogue_version=7))
    return path


def _table(given: np.ndarray, suggested: np.ndarray, chance: np.random.Generator) -> pa.Table:
    num = len(given)
    ids = [f"https://shop.example/products/{number:07d}.jpg" for number in range(num)]
    shares = np.sort(chance.random((num, 3)).astype(np.float32), axis=1)
    top = np.stack([suggested, given, *((suggested + step) % 1000 for step in (2, 3, 5))], axis=1)
    columns = {
        "row": np.arange(num),
        "sample_id": ids,
        "shard": ["s3://crawl/0.tar"] * num,
        "key": ids,
        "given_label": given,
        "predicted_label": suggested,
        "label_score": shares[:, 0],
        "confidence": shares[:, 2],
        "margin": shares[:, 2] - shares[:, 1],
        "top_labels": list(top),
        "top_shares": list(np.tile(np.array([0.5, 0.3, 0.1, 0.06, 0.04], np.float32), (num, 1))),
        "last_change_epoch": chance.integers(0, NUM_EPOCHS, num).astype(np.int32),
        "before": np.full(num, -1),
    }
    return pa.table(columns)
