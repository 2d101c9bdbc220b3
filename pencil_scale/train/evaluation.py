"""Evaluation: how often the network is right on clean samples, counted exactly, over all ranks.

Each rank reads its own share of a clean set, every sample once. A share that fits into memory is read by
threads of this process and kept; a larger one is read by Ray Data each time, as training samples are.

    clean = CleanSet(spec, rank, world, preparation.bring)
    right, seen = count_right(model, clean.batches(), config.images, device, bf16=False)      # of this rank
    clean.close()
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from pencil_scale.config.settings import Images
from pencil_scale.images.augment import centre
from pencil_scale.labels.owners import Batch
from pencil_scale.stream.stream import Stream, StreamSpec

CACHE_BYTES = 512 * 2**20


class CleanSet:
    """One rank's share of a clean set."""

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world: int,
        bring: Callable[[Batch], Batch],
        in_process: bool = False,
    ) -> None:
        """`bring` decodes a batch and copies it to the device. With `in_process` Ray is never used."""
        self._bring = bring
        self._stream = Stream(spec, rank, world, in_process=True)
        height, width = self._stream.image_size
        self.is_large = self._stream.num_rows / world * 3 * height * width > CACHE_BYTES
        if self.is_large and not in_process:
            self._stream = Stream(spec, rank, world)
        self._kept: list[Batch] | None = None

    def batches(self) -> Iterator[Batch]:
        """Read the samples; `noisy_class` is their true class, and unreadable images have weight 0."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        for batch in self._stream.batches(0):
            brought = self._bring(batch)
            if not self.is_large:
                kept.append(brought)
            yield brought
        self._kept = None if self.is_large else kept

    def close(self) -> None:
        self._stream.close()


@torch.no_grad()
def count_right(
    model: nn.Module, batches: Iterable[Batch], recipe: Images, device: torch.device, bf16: bool
) -> tuple[int, int]:
    """Count the samples whose class the network predicts, and all samples that could be read."""
    right, seen = torch.zeros(2, dtype=torch.int64, device=device)
    training, _ = model.training, model.eval()
    for batch in batches:
        images = centre(batch.images.to(device, non_blocking=True), recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            predicted = model(images).argmax(-1)
        readable = batch.weight.to(device, non_blocking=True) > 0
        true_class = batch.noisy_class.to(device, non_blocking=True)
        right += ((predicted == true_class) & readable).sum()
        seen += readable.sum()
    model.train(training)
    return int(right), int(seen)
