"""The plan: every row once, equal shares, the same order for any number of ranks and after a crash."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pencil_scale.catalogue.catalogue import Chunks
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.stream.plan import EpochOrder, batch_sizes, deal, mixed_key, num_steps


class Rows:
    """A catalogue with random damaged rows and image sizes, as planning sees it."""

    def __init__(self, num_rows: int, ok_share: float, mean_bytes: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.mask = generator.random(num_rows) < ok_share
        self.ok = np.flatnonzero(self.mask)
        self.sizes = generator.integers(1, 2 * mean_bytes, num_rows)
        num_chunks = -(-num_rows // CHUNK_ROWS)
        chunk = self.ok // CHUNK_ROWS
        self.chunks = Chunks(
            np.bincount(chunk, minlength=num_chunks).astype(np.int32),
            np.bincount(chunk, self.sizes[self.ok], num_chunks).astype(np.int64),
        )

    def ok_rows(self, chunk: int) -> np.ndarray:
        return self.ok[self.ok // CHUNK_ROWS == chunk]

    def order(self, epoch: int = 0, window_bytes: int = 1 << 16, shuffle: bool = True) -> EpochOrder:
        return EpochOrder(self.chunks, mixed_key(1, epoch) if shuffle else None, window_bytes)

    def shares(
        self, order: EpochOrder, world: int, visited: np.ndarray | None = None
    ) -> list[list[np.ndarray]]:
        cuts = deal(order.num_unread(visited, self.ok_rows), world)
        return [[order.piece(cut, visited).rows(self.ok_rows) for cut in share] for share in cuts]

    def in_order(self, order: EpochOrder, visited: np.ndarray | None = None) -> np.ndarray:
        return flat(self.shares(order, 1, visited)[0])


def flat(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *pieces])


catalogues = st.builds(
    Rows,
    num_rows=st.integers(0, 20_000),
    ok_share=st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]),
    mean_bytes=st.sampled_from([1, 60, 3_000]),
    seed=st.integers(0, 1000),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(catalogues, st.integers(1, 9), st.sampled_from([1_000, 1 << 16, 1 << 24]))
def test_every_row_is_read_once_in_shares_that_differ_by_at_most_one(
    rows: Rows, world: int, window_bytes: int
) -> None:
    shares = [flat(share) for share in rows.shares(rows.order(window_bytes=window_bytes), world)]
    assert np.array_equal(np.sort(np.concatenate(shares)), rows.ok)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(catalogues, st.integers(2, 9), st.integers(0, 100))
def test_the_order_is_the_same_for_any_number_of_ranks(rows: Rows, world: int, epoch: int) -> None:
    order = rows.order(epoch)
    alone = rows.in_order(order)
    position = np.full(len(rows.mask), -1)
    position[alone] = np.arange(len(alone))
    pieces = [piece for share in rows.shares(order, world) for piece in share]
    assert all(np.array_equal(np.diff(position[piece]), np.ones(len(piece) - 1)) for piece in pieces)
    for share in rows.shares(order, world):  # a rank reads its windows in the order of the epoch
        assert np.all(np.diff(position[flat(share)]) > 0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(catalogues, st.integers(1, 5), st.floats(0, 1), st.integers(0, 1000))
def test_rows_not_visited_before_a_crash_keep_their_order(
    rows: Rows, world: int, share: float, seed: int
) -> None:
    order = rows.order()
    visited = rows.mask & (np.random.default_rng(seed).random(len(rows.mask)) < share)
    complete = rows.in_order(order)
    assert np.array_equal(rows.in_order(order, visited), complete[~visited[complete]])
    again = np.concatenate([flat(share) for share in rows.shares(order, world, visited)])
    assert np.array_equal(np.sort(again), np.flatnonzero(rows.mask & ~visited))


@settings(max_examples=40, deadline=None)
@given(catalogues, st.integers(1, 4), st.floats(0, 1), st.integers(0, 1000))
def test_a_subset_is_read_once_and_nothing_else(rows: Rows, world: int, share: float, seed: int) -> None:
    subset = np.random.default_rng(seed).random(len(rows.mask)) < share
    chosen = rows.ok[subset[rows.ok]]
    counts = np.bincount(chosen // CHUNK_ROWS, minlength=len(rows.chunks.num_ok))
    order = EpochOrder(Chunks(counts.astype(np.int32), counts * 100), mixed_key(1, 0), 1 << 16, subset)
    cuts = [cut for share in deal(order.num_unread(), world) for cut in share]
    read = flat([order.piece(cut).rows(rows.ok_rows) for cut in cuts])
    assert np.array_equal(np.sort(read), chosen)


def test_a_run_that_is_killed_repeatedly_reads_what_an_undisturbed_run_reads() -> None:
    rows = Rows(30_000, 0.9, 3_000, 5)
    order = rows.order(window_bytes=1 << 22)
    visited, read = np.zeros(30_000, np.bool_), []
    while len(unread := rows.in_order(order, visited)):
        read.append(unread[:1_717])
        visited[unread[:1_717]] = True
    assert np.array_equal(np.concatenate(read), rows.in_order(order))


def test_every_epoch_and_seed_has_its_own_order_of_the_same_rows() -> None:
    rows = Rows(9_000, 0.9, 3_000, 2)
    orders = [
        EpochOrder(rows.chunks, mixed_key(seed, epoch), 1 << 22) for seed in (1, 2) for epoch in range(4)
    ]
    read = [rows.in_order(order) for order in orders]
    for number, one in enumerate(read):
        assert np.array_equal(np.sort(one), rows.ok)
        for other in read[:number]:
            assert np.mean(one == other) < 0.01  # two random orders agree in one position on average


def test_without_shuffling_rows_come_in_catalogue_order() -> None:
    rows = Rows(9_000, 0.5, 3_000, 3)
    assert np.array_equal(rows.in_order(rows.order(shuffle=False)), rows.ok)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(catalogues, st.sampled_from([20_000, 1 << 18, 1 << 22]))
def test_a_window_does_not_exceed_its_bytes_by_much(rows: Rows, window_bytes: int) -> None:
    order = rows.order(window_bytes=window_bytes)
    largest = int(rows.sizes.max(initial=0))
    for pieces in rows.shares(order, 1):
        for piece in pieces:
            # Sizes are known by chunk only: a stretch of few rows may hold more than its even share.
            spread = 4 * largest * len(order._chunk) ** 0.5
            assert rows.sizes[piece].sum() <= window_bytes + spread


@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_rank_has_at_least_eight_pieces_of_small_data(world: int) -> None:
    rows = Rows(200, 1.0, 10, 0)
    shares = rows.shares(rows.order(window_bytes=1 << 26), world)
    assert min(len(share) for share in shares) >= 8


def test_complete_windows_go_to_the_ranks_in_turn_until_the_last_ones() -> None:
    shares = deal(np.full(101, 40), 4)
    complete = [cut for share in shares for cut in share if cut.stop - cut.start == 40]
    assert len(complete) >= 100
    assert [share[0].window for share in shares] == [0, 1, 2, 3]
    assert [share[1].window for share in shares] == [4, 5, 6, 7]


def test_a_window_mixes_rows_from_far_apart() -> None:
    rows = Rows(40_000, 1.0, 100_000, 4)
    order = rows.order(window_bytes=64 << 20)
    windows = rows.shares(order, 1)[0]
    spreads = [len(np.unique(window // 256)) for window in windows if len(window) > 500]
    assert np.mean(spreads) > 6  # about eight stretches of 80 photos in each window


@pytest.mark.slow
def test_a_row_may_come_at_any_position_of_its_window() -> None:
    rows = Rows(1_000, 1.0, 10, 0)
    found = np.array([np.flatnonzero(rows.in_order(rows.order(epoch)) == 0)[0] for epoch in range(400)])
    # Uniform positions have mean 499.5 and deviation 288.7; the mean of 400 draws has deviation 14.4.
    assert abs(found.mean() - 499.5) < 5 * 14.4
    assert abs(found.std() - 288.7) < 40


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 5))
def test_batches_hold_every_row_and_all_but_the_last_two_are_full(total: int, batch: int, world: int) -> None:
    steps = num_steps(total, batch, world)
    for rank in range(world):
        share = total // world + (rank < total % world)
        sizes = batch_sizes(share, batch, steps)
        assert len(sizes) == steps
        assert sum(sizes) == share
        assert all(size == batch for size in sizes[:-2])
        assert len(sizes) < 2 or 0 <= sizes[-2] - sizes[-1] <= 1


@given(st.integers(2, 500), st.integers(4, 40))
def test_no_batch_has_a_single_row(total: int, batch: int) -> None:
    assert 1 not in batch_sizes(total, batch, num_steps(total, batch, 1))


def test_a_rank_with_fewer_rows_than_steps_ends_with_empty_batches() -> None:
    assert batch_sizes(2, 1, 3) == [1, 1, 0]
    assert batch_sizes(0, 8, 2) == [0, 0]


def test_planning_a_hundred_million_rows_needs_only_the_counts_of_chunks() -> None:
    num_chunks = 100_000_000 // CHUNK_ROWS
    num_ok = np.full(num_chunks, CHUNK_ROWS, np.int32)
    order = EpochOrder(Chunks(num_ok, np.full(num_chunks, CHUNK_ROWS * 3_000)), mixed_key(1, 0), 64 << 20)
    num_unread = order.num_unread()
    share = deal(num_unread, 64)[7]
    assert num_unread.sum() == num_chunks * CHUNK_ROWS
    assert abs(sum(cut.stop - cut.start for cut in share) - num_unread.sum() / 64) < 1
    assert len(order.piece(share[0]).stretches) < 20
