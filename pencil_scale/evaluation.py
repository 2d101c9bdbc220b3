"""How well the network does on clean samples: exact counts, over all ranks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pencil_scale.augment import Recipe, centre

CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class CleanBatch:
    """Some clean samples, decoded; an image that could not be read weighs 0."""

    images: Tensor  # uint8 [B, 3, H, W]
    weight: Tensor
    true_class: Tensor


class CleanSet:
    """A clean set as this rank sees it; one that is small is read once and kept."""

    def __init__(self, read: Callable[[], Iterable[CleanBatch]]) -> None:
        self._read = read
        self._kept: list[CleanBatch] | None = None

    def batches(self) -> Iterator[CleanBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[CleanBatch] | None = []
        num_bytes = 0
        for batch in self._read():
            num_bytes += batch.images.nbytes
            if num_bytes > CACHE_BYTES:
                kept = None
            if kept is not None:
                kept.append(batch)
            yield batch
        self._kept = kept


@torch.no_grad()
def count_right(
    model: nn.Module, clean: CleanSet, recipe: Recipe, device: torch.device, bf16: bool
) -> tuple[int, int]:
    """Count the samples of this rank whose class the network finds, and all it could read."""
    right = torch.zeros((), dtype=torch.int64, device=device)
    seen = 0
    training, _ = model.training, model.eval()
    for batch in clean.batches():
        images = centre(batch.images.to(device, non_blocking=True), recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            predicted = model(images).argmax(-1)
        readable = batch.weight.to(device) > 0
        right += ((predicted == batch.true_class.to(device)) & readable).sum()
        seen += int((batch.weight > 0).sum())
    model.train(training)
    return int(right), seen


def accuracy(right: float, seen: float) -> float:
    return right / seen if seen else float("nan")
