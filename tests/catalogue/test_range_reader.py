"""Many images from many shards: the right bytes, few requests, changed shards refused."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.catalogue.catalogue import Shard
from pencil_scale.catalogue.ranges import RangeReader, coalesce
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import ON_DISK, REMOTE, version_of


def shard_at(url: str | Path) -> Shard:
    version = version_of(str(url))
    assert version is not None
    return Shard(str(url), *version, rules="")


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    generator = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.tar" for number in range(3)]
    for path in paths:
        path.write_bytes(generator.bytes(3_000_000))
    return [shard_at(path) for path in paths]


def places(num_images: int, num_shards: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    shard = generator.integers(0, num_shards, num_images).astype(np.int32)
    return shard, generator.integers(0, 2_900_000, num_images), generator.integers(1, 90_000, num_images)


def expected(shards: list[Shard], shard: np.ndarray, offset: np.ndarray, length: np.ndarray) -> list[bytes]:
    complete = [fsspec.open(entry.url).open().read() for entry in shards]
    wanted = zip(shard, offset, length, strict=True)
    return [complete[number][start : start + size] for number, start, size in wanted]


def test_every_image_gets_its_own_bytes_in_the_requested_order(shards: list[Shard]) -> None:
    asked = places(500, 3)
    assert RangeReader(shards).read(*asked) == expected(shards, *asked)


def test_reading_no_rows_gives_no_images() -> None:
    none = np.empty(0, np.int64)
    assert RangeReader([]).read(none.astype(np.int32), none, none) == []


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 400)), min_size=1, max_size=60),
    st.integers(0, 300),
    st.integers(1, 2_000),
)
def test_ranges_hold_every_image_and_keep_to_their_bounds(
    images: list[tuple[int, int]], far_bytes: int, most_bytes: int
) -> None:
    offset, length = np.array(images).T
    ranges = coalesce(offset, length, np.arange(len(images)), far_bytes, most_bytes)
    assert sorted(np.concatenate([each.images for each in ranges])) == list(range(len(images)))
    for each in ranges:
        assert each.start == offset[each.images].min()
        assert each.stop == (offset + length)[each.images].max()
        assert each.stop - each.start <= max(most_bytes, length[each.images].max())
        covered = np.sort(offset[each.images])
        ends = np.maximum.accumulate((offset + length)[each.images])
        assert np.all(covered[1:] - ends[:-1] <= far_bytes)


def test_neighbours_share_a_request_and_far_ones_do_not() -> None:
    offset = np.array([0, 1_000, 2_000, 900_000, 901_000])
    ranges = coalesce(offset, np.full(5, 500), np.arange(5), far_bytes=4_000, most_bytes=1 << 20)
    assert [(each.start, each.stop) for each in ranges] == [(0, 2_500), (900_000, 901_500)]


@pytest.mark.parametrize("size", [2_999_999, 3_000_000])
def test_a_changed_shard_is_reported_before_any_of_its_bytes_are_used(shards: list[Shard], size: int) -> None:
    path = Path(shards[1].url)
    before = path.stat()
    path.write_bytes(os.urandom(size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000))
    found = r"3,000,000 bytes then, 2,999,999 now" if size == 2_999_999 else r"mtime:\d+ then, mtime:\d+ now"
    with pytest.raises(
        PencilError, match=rf"shard {path} changed since it was indexed: {found}; run index_shards again"
    ):
        RangeReader(shards).read(*places(50, 3))
    assert len(RangeReader(shards).read(*places(50, 1))) == 50  # the other shards are unchanged


def test_a_missing_shard_is_reported_at_once(shards: list[Shard]) -> None:
    Path(shards[2].url).unlink()
    with pytest.raises(PencilError, match=r"2.tar is missing since it was indexed; restore it"):
        RangeReader(shards).read(*places(50, 3))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_forbidden_shard_is_not_retried(shards: list[Shard]) -> None:
    Path(shards[0].url).chmod(0)
    with pytest.raises(PencilError, match=r"0.tar: cannot be opened: .*Permission denied"):
        RangeReader(shards).read(*places(5, 1))


def test_remote_shards_are_read_in_fewer_and_larger_requests_than_local_ones() -> None:
    offset = np.arange(0, 64_000_000, 600_000)
    sizes = np.full(len(offset), 20_000)
    counts = [
        len(coalesce(offset, sizes, np.arange(len(offset)), *gap_and_chunk))
        for gap_and_chunk in (ON_DISK, REMOTE)
    ]
    assert counts[0] == len(offset)
    assert counts[1] <= 10
