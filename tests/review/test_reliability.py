"""The review page compares the confidence of labels with how often they are right, where that is known."""

import json
from pathlib import Path

import numpy as np
from catalogue_making import image
from review_making import ReviewBench


def bench_with(folder: Path, true: list[int | None]) -> ReviewBench:
    """Samples that were given class 0 and have these true classes; the last two became class 1."""
    bench = ReviewBench(folder)
    members: list[tuple[str, bytes]] = []
    for number, one in enumerate(true):
        fields = json.dumps({} if one is None else {"true": one}).encode()
        members += [(f"{number}.png", image(number)), (f"{number}.cls", b"0"), (f"{number}.json", fields)]
    bench.shard("a.tar", members)
    bench.index(truth="json:true")
    bench.publish({len(true) - 2: 1, len(true) - 1: 1}, shares={0: 0.62, 1: 0.64})
    bench.report()
    return bench


def test_labels_of_known_truth_are_counted_by_their_confidence(tmp_path: Path) -> None:
    shown = bench_with(tmp_path, [0, 2, None, 1, 0]).shown()["reliability"]
    num, confidence, right = np.array(shown)
    assert num.tolist() == [0] * 6 + [2, 0, 2, 0]
    assert np.round(confidence, 3).tolist() == [0] * 6 + [1.26, 0, 1.6, 0]
    assert right.tolist() == [0] * 6 + [1, 0, 1, 0]


def test_without_known_truth_there_is_no_diagram(tmp_path: Path) -> None:
    assert bench_with(tmp_path, [None] * 4).shown()["reliability"] is None
