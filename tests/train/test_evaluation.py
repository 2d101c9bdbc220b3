"""Evaluation on clean samples: every sample is counted once, over all ranks."""

import numpy as np
import pytest
import torch
from loops import DEMO
from stream_making import Shards, five_shards
from torch import nn

from pencil_scale.config.loader import load_config
from pencil_scale.labels.owners import Batch
from pencil_scale.stream.stream import Stream
from pencil_scale.train import preparation
from pencil_scale.train.preparation import CleanSet, Preparation, count_clean

PLAIN = ["images.crop=2", "images.pad=0", "images.flip=false", "images.mean=[0,0,0]", "images.std=[1,1,1]"]
PREPARATION = Preparation(load_config(DEMO, PLAIN), torch.device("cpu"), lambda row, reason: reason)


class Brightest(nn.Module):
    """Predicts the brightest channel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def clean_batch(*channels: int, true: list[int], weight: list[float]) -> Batch:
    images = torch.zeros(len(channels), 3, 2, 2, dtype=torch.uint8)
    images[range(len(channels)), channels] = 255
    rows = torch.arange(len(channels))
    return Batch(rows, images, torch.tensor(weight), noisy_class=torch.tensor(true))


def right_and_seen(counts: np.ndarray) -> list[int]:
    by_margin, by_sureness = counts.tolist()
    assert sum(by_margin) == sum(by_sureness)
    return [by_margin[0], sum(by_margin)]


def test_correct_predictions_are_counted_and_unreadable_images_are_not() -> None:
    batches = [clean_batch(0, 1, 2, true=[0, 1, 0], weight=[1, 1, 1]), clean_batch(1, true=[1], weight=[0])]
    assert right_and_seen(count_clean(Brightest(), batches, PREPARATION)) == [2, 3]


def test_a_network_that_finds_all_classes_equally_likely_is_not_right_for_all() -> None:
    black = clean_batch(0, 1, 2, true=[0, 1, 2], weight=[1, 1, 1])
    black.images.zero_()
    assert right_and_seen(count_clean(Brightest(), [black], PREPARATION)) == [1, 3]


def test_the_network_returns_to_training_mode() -> None:
    model = Brightest().train()
    count_clean(model, [], PREPARATION)
    assert model.training


class RedModuloThree(nn.Module):
    """Predicts the remainder of the red value divided by three: correct for images up to number 255."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot((images[:, 0, 0, 0] * 255).round().long() % 3, 3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return five_shards(tmp_path_factory.mktemp("clean"))


def counts(shards: Shards, rank: int, world: int) -> tuple[list[int], bool]:
    """What two evaluations in a row counted, which must agree, and whether the set was treated as large."""
    clean = CleanSet(shards.spec(shuffle=False, batch=48), rank, world)
    first, again = (
        right_and_seen(count_clean(RedModuloThree(), clean.batches(), PREPARATION)) for _ in range(2)
    )
    clean.close()
    assert first == again
    return first, clean.is_large


def test_a_small_set_is_read_once_and_a_large_one_every_time(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    batches = Stream.batches
    monkeypatch.setattr(Stream, "batches", lambda *what: reads.append(1) or batches(*what))
    for cache_bytes, num_reads in ((1 << 20, 1), (5, 2)):
        monkeypatch.setattr(preparation, "CACHE_BYTES", cache_bytes)
        clean = CleanSet(shards.spec(shuffle=False), 0, 1, in_process=True)
        reads.clear()
        assert sum(len(batch.rows) for _ in range(2) for batch in clean.batches()) == 1000
        assert len(reads) == num_reads
        clean.close()


def test_the_ranks_count_every_sample_of_a_set_that_fits_into_memory_once(shards: Shards) -> None:
    found = [counts(shards, rank, 3) for rank in range(3)]
    assert [large for _, large in found] == [False] * 3
    assert [sum(numbers) for numbers in zip(*(numbers for numbers, _ in found), strict=True)] == [256, 500]


@pytest.mark.ray
@pytest.mark.slow
def test_a_large_set_is_read_by_ray_with_the_same_counts_even_if_no_processor_is_free(
    shards: Shards, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    class Holder:
        def holds(self) -> bool:
            return True

    # As read tasks of the next epoch do while their blocks are not taken.
    holder = ray.remote(Holder).options(num_cpus=ray.cluster_resources()["CPU"]).remote()
    assert ray.get(holder.holds.remote())
    monkeypatch.setattr(preparation, "CACHE_BYTES", 1000)
    found = [counts(shards, rank, 2) for rank in range(2)]
    ray.kill(holder)
    assert [large for _, large in found] == [True, True]
    assert [sum(numbers) for numbers in zip(*(numbers for numbers, _ in found), strict=True)] == [256, 500]
