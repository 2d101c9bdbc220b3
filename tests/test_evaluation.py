import torch
from torch import nn

from pencil_scale import evaluation
from pencil_scale.augment import Recipe
from pencil_scale.evaluation import CleanBatch, CleanSet, count_right

RECIPE = Recipe(crop=2, pad=0, flip=False, mean=(0, 0, 0), std=(1, 1, 1))


class Brightest(nn.Module):
    """Says the channel that is brightest."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def clean_batch(*channels: int, true: list[int], weight: list[float]) -> CleanBatch:
    images = torch.zeros(len(channels), 3, 2, 2, dtype=torch.uint8)
    images[range(len(channels)), channels] = 255
    return CleanBatch(images, torch.tensor(weight), torch.tensor(true))


def test_right_ones_are_counted_and_unreadable_ones_are_not() -> None:
    batches = [clean_batch(0, 1, 2, true=[0, 1, 0], weight=[1, 1, 1]), clean_batch(1, true=[1], weight=[0])]
    found = count_right(Brightest(), CleanSet(lambda: batches), RECIPE, torch.device("cpu"), bf16=False)
    assert found == (2, 3)


def test_the_network_goes_back_to_training() -> None:
    model = Brightest().train()
    count_right(model, CleanSet(list), RECIPE, torch.device("cpu"), bf16=False)
    assert model.training


def test_a_small_set_is_read_once_and_a_large_one_every_time(monkeypatch) -> None:
    reads: list[int] = []
    clean = CleanSet(lambda: reads.append(1) or [clean_batch(0, true=[0], weight=[1])])
    assert len([*clean.batches(), *clean.batches()]) == 2
    assert len(reads) == 1
    monkeypatch.setattr(evaluation, "CACHE_BYTES", 5)
    large = CleanSet(lambda: reads.append(1) or [clean_batch(0, true=[0], weight=[1])])
    assert len([*large.batches(), *large.batches()]) == 2
    assert len(reads) == 3
