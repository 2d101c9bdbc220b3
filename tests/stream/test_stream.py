"""The stream: every row once, in the order of the plan, with its own pixels; damage is named."""

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue_making import image, sample, samples
from stream_making import (
    CHANGED,
    NUM_ROWS,
    Shards,
    assert_damage_named,
    assert_own_pixels,
    damaged,
    five_shards,
    planned,
    rows_of,
    touched,
)
from tar_making import python_tar

from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.stream import FEWEST_AHEAD, MOST_AHEAD, Prefetch, Stream, StreamSpec
from pencil_scale.stream.window_reader import choose_for_gpu, read_piece, read_pieces


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return five_shards(tmp_path_factory.mktemp("stream"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_comes_once_with_its_own_pixels_in_the_order_of_the_plan(
    shards: Shards, world: int
) -> None:
    seen = []
    for rank in range(world):
        stream = Stream(shards.spec(), rank, world, in_process=True)
        batches = list(stream.batches(3))
        assert len(batches) == stream.num_steps()
        assert np.array_equal(rows_of(batches), planned(stream, 3))
        for batch in batches:
            assert_own_pixels(batch)
        seen.append(rows_of(batches))
    assert sorted(np.concatenate(seen)) == list(range(NUM_ROWS))


@pytest.mark.parametrize("world", [1, 2])
def test_kept_images_are_those_that_reading_again_would_give_and_the_shards_are_not_needed_again(
    shards: Shards, tmp_path: Path, world: int
) -> None:
    bench = five_shards(tmp_path)
    for rank in range(world):
        stream = Stream(bench.spec(keep_mb=1), rank, world, in_process=True)
        read_again = Stream(shards.spec(), rank, world, in_process=True)
        for epoch in range(2 if world == 1 else 4):
            batches = list(stream.batches(epoch))
            assert np.array_equal(rows_of(batches), rows_of(list(read_again.batches(epoch))))
            for batch in batches:
                assert_own_pixels(batch)
    for shard in tmp_path.glob("*.tar"):
        shard.unlink()
    assert len(rows_of(list(stream.batches(9)))) == len(rows_of(batches))
    with pytest.raises(PencilError, match=r"0\.tar"):
        list(Stream(bench.spec(keep_mb=0), in_process=True).batches(9))


def test_an_image_that_was_damaged_in_the_first_epoch_stays_damaged(tmp_path: Path) -> None:
    stream = Stream(damaged(tmp_path).spec(keep_mb=1), in_process=True)
    for epoch in range(3):
        assert_damage_named(list(stream.batches(epoch)), tmp_path)


def test_images_that_do_not_all_fit_are_not_kept(tmp_path: Path) -> None:
    bench = Shards(tmp_path)
    members = [[(f"{n:06d}.bmp", image(n, "BMP", size=256)), (f"{n:06d}.cls", b"1")] for n in range(6)]
    bench.shard("0.tar", [member for pair in members for member in pair])
    bench.index()
    stream = Stream(bench.spec(keep_mb=1), in_process=True)  # 1.2 MB
    assert len(rows_of(list(stream.batches(0)))) == 6
    (tmp_path / "0.tar").unlink()
    with pytest.raises(PencilError, match=r"0\.tar"):
        list(stream.batches(1))


def test_all_batches_but_the_last_two_are_full(shards: Shards) -> None:
    stream = Stream(shards.spec(batch=96), in_process=True)
    assert [len(batch.rows) for batch in stream.batches(0)] == [96, 96, 96, 96, 58, 58]


def test_a_rank_without_rows_gets_empty_batches_and_evaluation_leaves_them_out(shards: Shards) -> None:
    subset = np.arange(3)
    training = Stream(shards.spec(subset=subset, batch=1), 1, 2, in_process=True)
    assert [len(batch.rows) for batch in training.batches(0)] == [1, 0]
    evaluation = Stream(shards.spec(subset=subset, batch=1, shuffle=False), 1, 2, in_process=True)
    assert [len(batch.rows) for batch in evaluation.batches(0)] == [1]


def test_a_rank_that_never_gets_a_row_gets_an_empty_batch(shards: Shards) -> None:
    (batch,) = Stream(shards.spec(subset=np.arange(1)), 1, 2, in_process=True).batches(0)
    assert batch.images.shape == (0, 3, 4, 4)


def test_visited_rows_are_left_out_and_the_others_keep_their_order(shards: Shards) -> None:
    stream = Stream(shards.spec(), in_process=True)
    complete = rows_of(list(stream.batches(1)))
    visited = np.zeros(NUM_ROWS, np.bool_)
    visited[complete[:200]] = True
    assert np.array_equal(rows_of(list(stream.batches(1, visited))), complete[200:])
    assert stream.num_steps(visited) == 5


def test_of_a_subset_only_its_own_rows_are_read(shards: Shards) -> None:
    rows = np.arange(0, NUM_ROWS, 7)
    stream = Stream(shards.spec(subset=rows), in_process=True)
    assert np.array_equal(np.sort(rows_of(list(stream.batches(2)))), rows)


def test_a_subset_of_a_larger_catalogue_is_refused(shards: Shards) -> None:
    with pytest.raises(PencilError, match=r"row 500 does not fit a catalogue of 500 rows; .* balance_subset"):
        Stream(shards.spec(subset=np.array([3, 500])), in_process=True)


def test_evaluation_reads_the_rows_in_order(shards: Shards) -> None:
    stream = Stream(shards.spec(shuffle=False), in_process=True)
    assert rows_of(list(stream.batches(0))).tolist() == list(range(NUM_ROWS))


def test_images_for_the_gpu_stay_encoded(shards: Shards) -> None:
    stream = Stream(shards.spec(gpu_share=1.0), in_process=True)
    for batch in stream.batches(0):
        assert batch.encoded == dict(enumerate(map(image, batch.rows.tolist())))
        assert batch.images.shape == (0, 3, 4, 4)


@pytest.mark.parametrize(("world", "batch"), [(1, 64), (2, 64), (3, 7)])
def test_a_share_of_the_images_stays_encoded_chosen_by_their_rows_alone(
    shards: Shards, world: int, batch: int
) -> None:
    spec, left = shards.spec(gpu_share=0.3, batch=batch), []
    for rank, epoch in [(rank, epoch) for rank in range(world) for epoch in (0, 5)]:
        stream = Stream(spec, rank, world, in_process=True)
        batches = list(stream.batches(epoch))
        assert np.array_equal(rows_of(batches), planned(stream, epoch))
        for found in batches:
            rows = found.rows.tolist()
            assert found.encoded == {number: image(rows[number]) for number in found.encoded}
            others = np.delete(np.arange(len(rows)), list(found.encoded))
            own = replace(found, rows=found.rows[others], noisy_class=found.noisy_class[others])
            assert_own_pixels(replace(own, weight=found.weight[others]))
            left += [rows[number] for number in found.encoded]
    chosen = np.flatnonzero(choose_for_gpu(np.arange(NUM_ROWS), 0.3))
    assert sorted(left) == np.repeat(chosen, 2).tolist()  # in both epochs
    assert 120 < len(chosen) < 180


def test_a_larger_share_keeps_the_images_of_a_smaller_one() -> None:
    rows = np.arange(100_000)
    smaller, larger = choose_for_gpu(rows, 0.2), choose_for_gpu(rows, 0.6)
    assert abs(smaller.mean() - 0.2) < 0.005
    assert abs(larger.mean() - 0.6) < 0.005
    assert not np.any(smaller & ~larger)
    assert choose_for_gpu(rows, 1.0).all()
    assert not choose_for_gpu(rows, 0.0).any()


@pytest.mark.parametrize("decode", ["cpu", "0.3", "gpu"])
def test_evaluation_decodes_all_images_on_the_cpu_and_training_as_the_config_says(decode: str) -> None:
    overrides = [f"images.decode={decode}", "images.resize=32", "images.crop=28"]
    config = load_config("configs/cifar10.yaml", overrides)
    training = StreamSpec.from_config(config, version=1)
    assert training.gpu_share == {"cpu": 0.0, "0.3": 0.3, "gpu": 1.0}[decode]
    assert training.for_evaluation(config).gpu_share == 0.0
    assert StreamSpec.from_config(config, version=1, clean_set="test").gpu_share == 0.0


def test_images_of_many_sizes_are_resized_to_one(tmp_path: Path) -> None:
    bench = Shards(tmp_path)
    members = [member for n in range(20) for member in sample(n)]
    members += [("big.png", image(20, size=9)), ("big.cls", b"1")]
    bench.shard("0.tar", members)
    bench.index()
    batches = list(Stream(bench.spec(resize=6), in_process=True).batches(0))
    assert all(batch.images.shape[1:] == (3, 6, 6) for batch in batches)
    assert not any(batch.problems for batch in batches)


def test_an_image_that_does_not_decode_has_weight_0_and_is_named(tmp_path: Path) -> None:
    stream = Stream(damaged(tmp_path).spec(), in_process=True)
    assert_damage_named(list(stream.batches(0)), tmp_path)


def test_a_changed_shard_stops_the_stream_and_is_named(tmp_path: Path) -> None:
    stream = Stream(touched(tmp_path).spec(resize=4), in_process=True)
    with pytest.raises(PencilError, match=CHANGED):
        list(stream.batches(0))


def test_rows_visited_outside_the_subset_change_nothing(shards: Shards) -> None:
    stream = Stream(shards.spec(subset=np.arange(100)), in_process=True)
    visited = np.arange(NUM_ROWS) >= 400
    assert np.array_equal(rows_of(list(stream.batches(0, visited))), planned(stream, 0))
    assert stream.num_steps(visited) == 2


def test_a_visited_row_that_is_never_read_is_an_error_and_not_a_short_epoch(tmp_path: Path) -> None:
    bench = Shards(tmp_path)
    bench.shard("0.tar", [*samples(range(20)), *sample(20, label=77)])
    bench.index()
    stream = Stream(bench.spec(), in_process=True)
    visited = np.arange(21) == 20  # of an unknown class, so never trained on
    with pytest.raises(
        PencilError, match="a window was planned with 19 rows, 20 are there; the visited rows"
    ):
        list(stream.batches(0, visited))


def test_a_catalogue_without_ok_rows_is_refused(tmp_path: Path) -> None:
    bench = Shards(tmp_path)
    bench.shard("0.tar", [("a.png", image(1)), ("a.cls", b"0")])
    (tmp_path / "all.txt").write_text("a\n")
    bench.index(exclude=f"{tmp_path}/all.txt")
    with pytest.raises(PencilError, match="no row to read"):
        Stream(bench.spec(), in_process=True)


def test_an_epoch_left_early_does_not_disturb_the_next(shards: Shards) -> None:
    stream = Stream(shards.spec(batch=8), in_process=True)
    for _ in stream.batches(0):
        break
    assert np.array_equal(rows_of(list(stream.batches(1))), planned(stream, 1))


@pytest.mark.parametrize(("pieces_at_once", "together"), [(1, [9, 9, 9]), (10, [18, 9]), (256, [27])])
def test_the_next_epoch_is_read_while_this_one_is_trained(
    shards: Shards, pieces_at_once: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []  # the numbers of pieces that are handed to the readers

    def noted(spec: Any, pieces: Any) -> Any:
        started.append(len(pieces))
        return read_pieces(spec, pieces)

    monkeypatch.setattr("pencil_scale.stream.stream.read_pieces", noted)
    monkeypatch.setattr("pencil_scale.stream.stream.PIECES_AT_ONCE", pieces_at_once)
    stream = Stream(shards.spec(num_epochs=3), in_process=True)
    coming = stream.batches(0)
    first = next(coming)
    for _ in range(3000):  # all three fit into what is read ahead
        if started == together:
            break
        time.sleep(0.01)
    assert started == together
    assert np.array_equal(rows_of([first, *coming]), planned(stream, 0))
    for epoch in (1, 2):
        assert np.array_equal(rows_of(list(stream.batches(epoch))), planned(stream, epoch))
    stream.close()


def test_what_is_read_ahead_is_bounded_in_bytes(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []

    class Noted(Prefetch):  # type: ignore[type-arg]
        def __init__(self, items: Iterator[Any], depth: int, *options: Any) -> None:
            depths.append(depth)
            super().__init__(items, depth, *options)

    monkeypatch.setattr("pencil_scale.stream.stream.Prefetch", Noted)
    stream = Stream(shards.spec(batch=8), in_process=True)
    height, width = stream.image_size
    for ahead_bytes in (8 * 3 * height * width * 7, 1, 1 << 40):
        monkeypatch.setattr("pencil_scale.stream.stream.AHEAD_BYTES", ahead_bytes)
        list(stream.batches(0))
    assert depths == [7, FEWEST_AHEAD, MOST_AHEAD]
    stream.close()


def test_an_epoch_read_too_early_is_dropped_when_another_is_wanted(shards: Shards) -> None:
    stream = Stream(shards.spec(num_epochs=9), in_process=True)
    list(stream.batches(0))
    visited = np.zeros(NUM_ROWS, np.bool_)
    visited[::3] = True
    assert np.array_equal(rows_of(list(stream.batches(1, visited))), planned(stream, 1, visited))
    assert np.array_equal(rows_of(list(stream.batches(2))), planned(stream, 2))
    for _ in stream.batches(3):
        break
    assert np.array_equal(rows_of(list(stream.batches(3))), planned(stream, 3))
    assert np.array_equal(rows_of(list(stream.batches(7))), planned(stream, 7))
    stream.close()


def test_batches_are_made_ahead_and_no_further() -> None:
    made = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    ahead = Prefetch(numbers(), depth=3)
    taken = iter(ahead)
    assert next(taken) == 0
    deadline = time.monotonic() + 20
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == [0, 1, 2, 3, 4]  # one taken, three in the queue, one waiting to be put
    ahead.stop()
    assert len(made) == 5


@pytest.mark.slow
def test_a_read_task_holds_about_one_window_of_any_amount_of_data(tmp_path: Path) -> None:
    bench = Shards(tmp_path)
    for number in range(4):
        numbers = range(number * 80, number * 80 + 80)
        pairs = [[(f"{n:06d}.bmp", image(n, "BMP", size=256)), (f"{n:06d}.cls", b"1")] for n in numbers]
        bench.shard(f"{number}.tar", [member for pair in pairs for member in pair])
    bench.index()
    stream = Stream(bench.spec(window_mb=8), in_process=True)
    pieces, _ = stream.plan(0)
    assert len(pieces) > 6  # 63 MB
    tracemalloc.start()
    num_rows = sum(len(table) for piece in pieces for table in read_piece(stream.read, piece))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_rows == 320
    # The bytes of the window, eight ranges of 1 MiB in flight, and pixels of half a window.
    assert peak < (8 + 8 + 4 + 2) << 20


@pytest.fixture
def s3(s3_endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem()


@pytest.mark.slow
def test_shards_on_s3_are_read_by_ranges_and_a_rewritten_object_is_named(tmp_path: Path, s3: Any) -> None:
    s3.mkdir("crawl")
    for number in range(3):
        s3.pipe_file(f"crawl/{number}.tar", python_tar(samples(range(number * 50, number * 50 + 50))))
    bench = Shards(tmp_path)
    bench.index(shards="s3://crawl/{0..2}.tar")
    stream = Stream(bench.spec(), in_process=True)
    batches = list(stream.batches(0))
    assert np.array_equal(rows_of(batches), planned(stream, 0))
    for batch in batches:
        assert_own_pixels(batch)
    s3.pipe_file("crawl/1.tar", python_tar(samples(range(150, 200))))  # equally long, other products
    with pytest.raises(
        PencilError,
        match=r"^shard s3://crawl/1.tar changed since it was indexed: etag:\S+ then, etag:\S+ now",
    ):
        list(stream.batches(1))
    s3.rm_file("crawl/1.tar")
    with pytest.raises(PencilError, match=r"^shard s3://crawl/1.tar is missing since it was indexed"):
        list(stream.batches(2))
