"""What a worker prepares: its process, its scratch folders, its network, and every batch before its step.

    set_up_process(config, device)
    folder = claim_scratch(config.workers.scratch, "labels")
    model, stepper = build_network(config, num_classes, device, world)
    preparation = Preparation(config, device, stream.read.name_problem)
    for batch in preparation.ahead(batches):                # decoded
        preparation.prepare(batch, epoch, stage)            # on the device, augmented, never empty

A scratch folder is locked by its process, and the system releases the lock when the process dies, however it
dies. A process that claims a folder first removes the folders beside it that are not locked any more: after
`kill -9` nothing remains for long.

Each rank evaluates its own share of a clean set, every sample once. A share that fits into memory is read by
threads of this process and kept; a larger one is read by Ray Data each time, as training samples are.

    clean = CleanSet(spec, rank, world)
    counts = count_clean(model, clean.batches(), preparation)           # of this rank, by margin and sureness
"""

import copy
import fcntl
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Config
from pencil_scale.features.head import build_head
from pencil_scale.features.manifest import FeatureManifest
from pencil_scale.features.network import load_frozen
from pencil_scale.features.stream import full
from pencil_scale.features.table import FeatureTable
from pencil_scale.images.augment import augment, centre, strengthen
from pencil_scale.images.gpu_decode import decode_on_gpu
from pencil_scale.labels.owners import Batch
from pencil_scale.method.backbones import build_backbone, find_head
from pencil_scale.method.proof import Counts, count, no_counts
from pencil_scale.method.schedule import Stage
from pencil_scale.storage.hashing import hashes
from pencil_scale.storage.storage import Storage
from pencil_scale.stream.plan import mixed_key
from pencil_scale.stream.stream import Prefetch, Stream, StreamSpec
from pencil_scale.train.average import Average
from pencil_scale.train.step import StepGraph, Stepper, top_predictions

SWITCH_S = 0.0005  # how long a thread of Python runs before another one may
DECODED_AHEAD = 2  # batches, each of which is hundreds of photos in the GPU's memory
PATIENCE_S = 10.0
FEWEST_ROWS = 2  # batch norm needs more than one sample
CACHE_BYTES = 512 * 2**20  # of a clean set
LOCKED, NEW = "pencil_scale-locked-", "pencil_scale-new-"  # names of scratch folders

_locks: dict[Path, int] = {}  # our scratch folders, and the open handles that lock them


def set_up_process(config: Config, device: torch.device) -> None:
    """Set what is global to the process: seed, threads, and fast or repeatable arithmetic."""
    torch.manual_seed(config.run.seed)
    if config.model.head and device.type == "cpu":
        torch.set_num_threads(1)  # its tensors are so small that threads would mostly wait for each other
    # Reading and carrying labels run in threads of this process too: a step must not wait 5 ms for each.
    sys.setswitchinterval(SWITCH_S)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    elif device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")


def claim_scratch(parent: str | None, kind: str) -> Path:
    """Make a locked folder under `parent` (None: the system's temporary folder)."""
    base = Path(parent or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    for folder in [folder for folder in _locks if not folder.exists()]:
        os.close(_locks.pop(folder))  # a long run makes many
    sweep_scratch(base)
    # Other processes judge a folder by its lock, so it gets its name only when it is locked.
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=base))
    folder = base / new.name.replace(NEW, f"{LOCKED}{kind}-")
    _locks[folder] = os.open(new, os.O_RDONLY)
    with suppress(OSError):  # on a disk without locks: then nothing is ever swept
        fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return new.rename(folder)


def sweep_scratch(base: Path) -> None:
    """Remove the scratch folders of dead processes."""
    for folder in (folder for folder in base.glob(f"{LOCKED}*") if folder not in _locks):
        with suppress(OSError):  # it is locked, was removed meanwhile, or belongs to another user
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def open_features(config: Config, version: int, folder: Path) -> FeatureTable | None:
    """Map a local copy of the features in this folder, if only a head is trained.

    Rows with another image in this version of the catalogue have no features.
    """
    if config.model.head is None:
        return None
    storage = Storage(config.run.storage)
    key = FeatureManifest.choose(storage, config.features.name).key
    return FeatureTable.open(storage, key, folder, Catalogue.open(storage.url, version))


def build_network(
    config: Config,
    num_classes: int,
    device: torch.device,
    world: int,
    weights: str | None = None,
    table: FeatureTable | None = None,
) -> tuple[nn.Module, Stepper | StepGraph]:
    """Build the network, from pretrained weights or at random, and the stepper that trains it.

    If there is a table of features, the network is the head that is trained on them.
    """
    model = build_backbone(config.model.backbone, num_classes, weights)
    if table is not None:
        layer = model.get_submodule(find_head(config.model.backbone))
        model = build_head(table, num_classes, layer, config.model.head or "linear")
    if config.optimizer.sync_batch_norm and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if device.type == "cuda" and table is None:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.0,  # set at every step
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
        fused=device.type == "cuda",
    )
    return model, build_stepper(config, model, optimizer, device, world)


def build_stepper(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, world: int
) -> Stepper | StepGraph:
    """Compile the network if the config says so, and share gradients if there are other ranks."""
    options = config.optimizer
    network: Any = model
    average = Average(model) if has_average(config) else None
    compiled_average: Any = None
    if options.compile != "off":
        network = torch.compile(model, mode=options.compile, dynamic=False)
        if average is not None:
            compiled_average = torch.compile(average.network, mode=options.compile, dynamic=False)
    if world > 1:
        # Buffers are not shared: each rank keeps the running statistics of its own batches, and the loop
        # averages them before they are used.
        known = inspect.signature(DistributedDataParallel).parameters
        renamed = "forward_sync_buffers" in known  # since torch 2.15
        buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        devices = [device] if device.type == "cuda" else None
        network = DistributedDataParallel(network, device_ids=devices, **buffers)
    plain = Stepper(
        network,
        optimizer,
        options.precision == "bf16",
        options.accumulation,
        average=average,
        compiled_average=compiled_average,
        fresh=copy.deepcopy(model.state_dict()) if config.stages.finetune.restart else {},
    )
    if not options.cuda_graph:
        return plain
    return StepGraph(
        plain, odd=replace(plain, model=model, compiled_average=None), full_batch=options.batch_per_worker
    )


def has_average(config: Config) -> bool:
    """Whether any stage uses an average of the network."""
    return config.stages.pencil.teacher is not None or config.stages.finetune.average is not None


@dataclass(frozen=True)
class Preparation:
    """Brings batches to the device as the network wants them."""

    config: Config
    device: torch.device
    name_problem: Callable[[int, str], str]

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on; encoded ones are decoded in a thread while the GPU trains."""
        if self.config.images.decode == "cpu" or self.config.model.head:
            yield from batches
            return
        coming = Prefetch((self.decode(batch) for batch in batches), DECODED_AHEAD)
        try:
            yield from coming
        finally:
            coming.stop(PATIENCE_S)  # otherwise two threads would read from one stream

    def prepare(self, batch: Batch, epoch: int, stage: Stage) -> Batch:
        """Bring a batch to the device, augment it, and pad it if it has too few samples."""
        decoded = self.decode(batch)
        images = self._augmented(decoded.images.to(self.device, non_blocking=True), batch.rows, epoch)
        brought = replace(decoded, images=images, weight=decoded.weight.to(self.device, non_blocking=True))
        if len(batch.rows) < FEWEST_ROWS:
            return self._padded(brought)
        if stage.decay and (stage.mixup or stage.strong):
            brought = replace(brought, weak_images=images)  # for the average
        if stage.strong:
            images = strengthen(images, batch.rows, self.config.run.seed, epoch)
            brought = replace(brought, images=images)
        return self._mixed(brought, epoch, stage.mixup) if stage.mixup else brought

    def _mixed(self, batch: Batch, epoch: int, parameter: float) -> Batch:
        """Blend each image with the one before it, unless that could not be read; its own share is larger."""
        chance = np.random.default_rng([self.config.run.seed, epoch, int(batch.rows[0])])
        drawn = chance.beta(parameter, parameter)
        before = batch.weight.roll(1, 0) > 0
        own = torch.where(before, max(drawn, 1 - drawn), 1.0)[:, None]  # [B, 1]
        images = batch.images
        mixed = torch.lerp(images.roll(1, 0), images, own.view(-1, *[1] * (images.dim() - 1)))
        return replace(batch, images=mixed, own=own)

    def _padded(self, brought: Batch) -> Batch:
        """Add blank samples of weight 0, so that every rank has something to compute."""
        images, missing = brought.images, FEWEST_ROWS - len(brought.rows)
        if missing == FEWEST_ROWS and not self.config.model.head:
            crop = self.config.images.crop
            images = brought.weight.new_zeros(0, 3, crop, crop)

        def padded(values: Tensor) -> Tensor:
            return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])

        return replace(
            brought,
            images=padded(images),
            weight=padded(brought.weight),
            label_logits=padded(brought.label_logits),
            noisy_class=padded(brought.noisy_class),
        )

    def _augmented(self, images: Tensor, rows: Tensor, epoch: int) -> Tensor:
        """Draw a variant of each sample, which depends on seed, epoch and row alone."""
        seed = self.config.run.seed
        if self.config.model.head:
            if images.shape[1] == 1:
                return full(images[:, 0])
            view = hashes(rows.numpy(), mixed_key(seed, epoch)) % np.uint64(images.shape[1])
            return full(images[torch.arange(len(images)), torch.from_numpy(view.astype(np.int64))])
        images = augment(images, rows, seed, epoch, self.config.images)
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images

    def plain(self, images: Tensor) -> Tensor:
        """What the network sees of samples when it is evaluated."""
        images = images.to(self.device, non_blocking=True)
        return full(images).mean(1) if self.config.model.head else centre(images, self.config.images)

    def predictions(self, model: nn.Module, images: Tensor) -> Tensor:
        """Let a network in evaluation mode predict samples."""
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.optimizer.precision == "bf16"
        ):
            class_logits: Tensor = model(self.plain(images))
        return class_logits

    def decode(self, batch: Batch) -> Batch:
        """Decode encoded images on the GPU; the weights stay on the host, as a copy waits for the step."""
        if not batch.encoded:
            return batch
        resize = self.config.images.resize
        images, problems = decode_on_gpu(batch.encoded, batch.images, self.device, resize)
        named = [self.name_problem(int(batch.rows[n]), reason) for n, reason in problems.items()]
        weight = batch.weight.clone()
        weight[list(problems)] = 0.0
        return replace(batch, images=images, weight=weight, problems=(*batch.problems, *named), encoded={})


class CleanSet:
    """One rank's share of a clean set; with `in_process` Ray is never used.

    With a frozen network, the features of the images are computed once and kept.
    """

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world: int,
        in_process: bool = False,
        featured: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._stream = Stream(spec, rank, world, in_process=True)
        height, width = self._stream.image_size
        self._featured = featured
        self.is_large = self._stream.num_rows / world * 3 * height * width > CACHE_BYTES
        self.is_large &= featured is None
        if self.is_large and not in_process:
            self._stream = Stream(spec, rank, world)
        self._kept: list[Batch] = []
        self.close = self._stream.close

    def batches(self) -> Iterator[Batch]:
        """Read the samples; `noisy_class` is their true class, and unreadable images have weight 0."""
        if self.is_large:
            return self._stream.batches(0)
        if not self._kept:
            read = self._stream.batches(0)
            self._kept = list(read if self._featured is None else map(self._featured, read))
        return iter(self._kept)


def featured_by(config: Config, weights: str | None) -> Callable[[Batch], Batch]:
    """A function that replaces the images of a batch by their features."""
    frozen, _ = load_frozen(config.model.backbone, weights, config.images.crop, config.run.seed)

    @torch.inference_mode()
    def featured(batch: Batch) -> Batch:
        found = frozen.module(centre(batch.images.to(frozen.device), config.images))
        return replace(batch, images=found[:, None].half().cpu().clone())

    return featured


def count_clean(model: nn.Module, batches: Iterable[Batch], preparation: Preparation) -> Counts:
    """Count the samples that can be read, by margin and by sureness, as `proof.count` does."""
    found = (counts for *_, counts in predict(model, batches, preparation))
    return sum(found, start=no_counts())


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[Batch], preparation: Preparation
) -> Iterator[tuple[Tensor, Tensor, Tensor, Counts]]:
    """Yield rows of readable images, what the network predicts for them, their given classes, and counts."""
    training, _ = model.training, model.eval()
    for batch in batches:
        readable = batch.weight > 0
        logits = preparation.predictions(model, batch.images)
        predicted = top_predictions(logits)[readable.to(preparation.device)]
        given = batch.noisy_class[readable]
        counts = count(predicted.cpu().numpy(), given.numpy(), logits.shape[1])
        yield batch.rows[readable], predicted, given, counts
    model.train(training)
