"""How well the network does on clean samples: exact counts, over all ranks.

Each rank reads its own share of a clean set, every sample once. A share that fits into memory is read by
threads of this process and kept; a larger one is read by Ray Data each time, as training samples are.

    clean = CleanSet(CleanReader(spec, rank, world, preparation.bring))
    right, seen = count_right(model, clean, recipe, device, bf16=False)      # of this rank: add up all ranks
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pencil_scale.images.augment import Recipe, centre
from pencil_scale.labels.owners import Batch
from pencil_scale.stream.stream import Stream, StreamSpec

CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class CleanBatch:
    """Some clean samples, decoded; an image that could not be read weighs 0."""

    images: Tensor  # uint8 [B, 3, H, W]
    weight: Tensor
    true_class: Tensor


class CleanReader:
    """Reads one rank's share of a clean set, however large, as often as asked."""

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world: int,
        bring: Callable[[Batch], Batch],
        in_process: bool = False,
    ) -> None:
        """`in_process` keeps large sets from Ray too, for a run that trains in the command's own process."""
        self._bring = bring
        self.stream = Stream(spec, rank, world, in_process=True)
        height, width = self.stream.image_size
        self.is_large = self.stream.num_rows / world * 3 * height * width > CACHE_BYTES
        if self.is_large and not in_process:
            self.stream = Stream(spec, rank, world)

    def __call__(self) -> Iterator[CleanBatch]:
        for batch in self.stream.batches(0):
            brought = self._bring(batch)
            yield CleanBatch(brought.images, brought.weight, batch.noisy_class)

    def close(self) -> None:
        """End reading, and let go of what it held."""
        self.stream.close()


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
    seen = torch.zeros((), dtype=torch.int64, device=device)
    training, _ = model.training, model.eval()
    for batch in clean.batches():
        images = centre(batch.images.to(device, non_blocking=True), recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            predicted = model(images).argmax(-1)
        readable = batch.weight.to(device, non_blocking=True) > 0
        true_class = batch.true_class.to(device, non_blocking=True)
        right += ((predicted == true_class) & readable).sum()
        seen += readable.sum()
    model.train(training)
    return int(right), int(seen)


def accuracy(right: float, seen: float) -> float:
    return right / seen if seen else float("nan")
