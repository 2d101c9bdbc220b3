"""Shards to stream from, and checks of their batches, for the tests of the stream."""

import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from catalogue_making import Bench, image, samples

from pencil_scale.labels.owners import Batch
from pencil_scale.stream.stream import Stream, StreamSpec
from pipelines.index_shards import Summary

NUM_ROWS = 500


class Shards(Bench):
    """Shards of small images, whose red and green encode the number; the catalogue is copied to disk."""

    def index(self, **data: Any) -> Summary:
        summary = super().index(**data)
        fsspec.filesystem("memory").get(f"{self.storage}/catalogue", f"{self.disk}/catalogue", recursive=True)
        return summary

    @property
    def disk(self) -> str:
        """A folder in which other processes find the catalogue."""
        return str(self.folder / "storage")

    def spec(self, **options: Any) -> StreamSpec:
        return StreamSpec(self.disk, **{"version": 1, "batch": 64, "window_mb": 1, **options})


def five_shards(folder: Path) -> Shards:
    bench = Shards(folder)
    for number in range(5):
        bench.shard(f"{number}.tar", samples(range(number * 100, number * 100 + 100)))
    bench.index()
    return bench


def planned(stream: Stream, epoch: int, visited: np.ndarray | None = None) -> np.ndarray:
    ok_rows = stream._selection.ok_rows
    pieces = [piece.rows(ok_rows) for piece in stream.plan(epoch, visited)[0]]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def rows_of(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *[batch.rows.numpy() for batch in batches]])


def assert_own_pixels(batch: Batch) -> None:
    """Row n holds the image of number n: red n % 256, green n // 256, blue 7; class n % 3."""
    rows = batch.rows.numpy()
    assert batch.images.shape == (len(rows), 3, 4, 4)
    assert np.array_equal(batch.images[:, 0, 0, 0].numpy(), rows % 256)
    assert np.array_equal(batch.images[:, 1, 3, 3].numpy(), rows // 256)
    assert np.all(batch.images[:, 2].numpy() == 7)
    assert np.array_equal(batch.noisy_class.numpy(), rows % 3)
    assert batch.weight.tolist() == [1.0] * len(rows)


def damaged(folder: Path) -> Shards:
    """Row 5 starts like a PNG and is damaged; row 9 has another size than all others."""
    bench = Shards(folder)
    members = samples(range(30))
    broken = image(5)[:41] + bytes(40)
    members = [(name, broken if name == "000005.png" else data) for name, data in members]
    members = [(name, image(9, size=5) if name == "000009.png" else data) for name, data in members]
    bench.shard("0.tar", members)
    bench.index()
    return bench


def assert_damage_named(batches: list[Batch], folder: Path) -> None:
    problems = sorted(problem for batch in batches for problem in batch.problems)
    assert len(problems) == 2
    assert problems[0].startswith(f"row 5 ('000005', {folder}/0.tar at byte ")
    assert "png of 81 bytes: " in problems[0]
    assert problems[1].endswith("5 x 5 pixels among images of 4 x 4; set images.resize")
    for batch in batches:
        bad = np.isin(batch.rows.numpy(), [5, 9])
        assert np.array_equal(batch.weight.numpy(), 1.0 - bad)
        assert np.all(batch.images[bad].numpy() == 0)


def touched(folder: Path) -> Shards:
    bench = Shards(folder)
    for number in range(2):
        bench.shard(f"{number}.tar", samples(range(number * 20, number * 20 + 20)))
    bench.index()
    os.utime(folder / "1.tar", ns=(1, 1))
    return bench


CHANGED = (
    r"^shard .*/1\.tar changed since it was indexed: mtime:\d+ then, mtime:1 now; run index_shards again$"
)
