"""What happens on the device before a step: the network built, images decoded, augmented and padded."""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.config.settings import Config
from pencil_scale.images.augment import Recipe, augment
from pencil_scale.images.gpu_decode import decode_on_gpu
from pencil_scale.labels.owners import Batch
from pencil_scale.method.backbones import build_backbone
from pencil_scale.stream.batches import Prefetch
from pencil_scale.train.step import Stepper
from pencil_scale.train.step_graph import StepGraph

SWITCH_S = 0.0005  # how long a thread of Python runs before another one may
DECODED_AHEAD = 2  # batches, each of which is hundreds of photos in the GPU's memory
PATIENCE_S = 10.0
FEWEST_ROWS = 2  # batch norm cannot learn from one sample


def settle(config: Config, device: torch.device) -> None:
    """Set what is global to the process: seed, turns of threads, and fast or repeatable arithmetic."""
    torch.manual_seed(config.run.seed)
    # Reading and carrying labels are threads of this process too: a step that waits 5 ms for each is late.
    sys.setswitchinterval(SWITCH_S)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    elif device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")


def set_aside() -> None:
    """Spare Python's garbage collector all there is by now: modules, the network, what compiling it left.

    It would look through hundreds of thousands of objects again and again, while the GPU waits. To be called
    once everything has been in use; `gc.unfreeze()` takes it back.
    """
    gc.collect()
    gc.freeze()


def build_model(config: Config, num_classes: int, device: torch.device) -> nn.Module:
    model = build_backbone(config.model.backbone, num_classes, config.model.weights)
    if config.optimizer.sync_batch_norm and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    return model.to(device)


def build_optimizer(config: Config, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(),
        lr=0.0,  # set at every step
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
        fused=device.type == "cuda",
    )


def build_stepper(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, world: int
) -> Stepper | StepGraph:
    """Compile the network where asked, and share gradients where there are others to share with."""
    options = config.optimizer
    network: Any = model
    if options.compile != "off":
        network = torch.compile(model, mode=options.compile, dynamic=False)
    if world > 1:
        network = _shared(network, device)
    plain = Stepper(network, optimizer, options.precision == "bf16", options.accumulation)
    if not options.cuda_graph:
        return plain
    return StepGraph(plain, odd=replace(plain, model=model), full_batch=options.batch_per_worker)


def _shared(network: nn.Module, device: torch.device) -> nn.Module:
    """Share gradients with the other ranks.

    Buffers are not shared: each rank keeps the running statistics of its own batches, and the loop averages
    them before they are used.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )  # before 2.15
    options: dict[str, Any] = {buffers: False}
    return DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None, **options)


@dataclass(frozen=True)
class Preparation:
    """Brings batches to the device as the network wants them."""

    config: Config
    device: torch.device
    name_problem: Callable[[int, str], str]

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on; those that come encoded are decoded by a thread, while the GPU trains."""
        if self.config.images.decode == "cpu":
            yield from batches
            return
        coming = Prefetch((self.decode(batch) for batch in batches), DECODED_AHEAD)
        try:
            yield from coming
        finally:
            coming.join(PATIENCE_S)  # else two would read from one stream

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """Bring a batch over, augment it, and never leave it without any sample."""
        recipe = Recipe.from_config(self.config.images)
        brought = self.bring(batch)
        images = augment(brought.images, batch.rows, self.config.run.seed, epoch, recipe)
        if self.device.type == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        prepared = replace(brought, images=images)
        return prepared if len(batch.rows) >= FEWEST_ROWS else _padded(prepared, recipe.crop)

    def bring(self, batch: Batch) -> Batch:
        """Bring images, decoded, and weights to the device."""
        decoded = self.decode(batch)
        images = decoded.images.to(self.device, non_blocking=True)
        return replace(decoded, images=images, weight=decoded.weight.to(self.device, non_blocking=True))

    def decode(self, batch: Batch) -> Batch:
        """Decode images that come encoded, on the GPU; the weights stay here.

        To bring them over is to wait for the step under way, which this must not.
        """
        if isinstance(batch.images, torch.Tensor):
            return batch
        images, weight, problems = decode_on_gpu(batch.images, self.device, self.config.images.resize)
        named = (self.name_problem(int(batch.rows[n]), reason) for n, reason in problems.items())
        return replace(batch, images=images, weight=weight, problems=tuple(named))


def _padded(batch: Batch, side: int) -> Batch:
    """Add blank samples of weight 0: they teach nothing, but every rank has something to compute."""
    missing = FEWEST_ROWS - len(batch.rows)
    images = batch.images if len(batch.rows) else batch.weight.new_zeros(0, 3, side, side)
    return replace(
        batch,
        images=torch.cat([images, images.new_zeros(missing, 3, side, side)]),
        weight=torch.cat([batch.weight, batch.weight.new_zeros(missing)]),
        label_logits=torch.cat(
            [batch.label_logits, batch.label_logits.new_zeros(missing, batch.label_logits.shape[1])]
        ),
        noisy_class=torch.cat([batch.noisy_class, batch.noisy_class.new_zeros(missing)]),
    )
