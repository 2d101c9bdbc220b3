"""What every training process does: its network, its share of the labels and of the samples, the loop.

Runs inside a Ray Train worker. Small words between the ranks (counts, the wish to stop, manifests) go over a
gloo group of their own, used by the training thread alone; gradients go over NCCL or gloo, labels over the
owners' group.
"""

import gc
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

from pencil_scale.config.settings import Config
from pencil_scale.images.augment import Recipe
from pencil_scale.labels.exchange import OwnersError
from pencil_scale.labels.manifest import Manifest, merge
from pencil_scale.labels.owners import Owners, owned_parts
from pencil_scale.labels.report import LabelStudy
from pencil_scale.labels.snapshot import visited
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.train.checkpoint import Origin, Progress, Saved, read_checkpoint, write_checkpoint
from pencil_scale.train.checkpoint_store import CheckpointStore
from pencil_scale.train.control import StopWatch, tell
from pencil_scale.train.evaluation import CleanReader, CleanSet, accuracy, count_right
from pencil_scale.train.loop import Epoch, Hooks, Loop, Pace
from pencil_scale.train.preparation import (
    Preparation,
    build_model,
    build_optimizer,
    build_stepper,
    set_aside,
    settle,
)
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.scratch import claim
from pencil_scale.train.step import Stepper
from pencil_scale.train.step_graph import StepGraph

STOP_EVERY = 8  # steps between two questions whether to stop: each is a word between all ranks


@dataclass(frozen=True)
class Job:
    """All a worker is told."""

    config: Config
    origin: Origin  # which run this is; checkpoints of any other are refused
    resume: str | None  # a checkpoint that an earlier attempt left
    labels: Manifest  # where labels start, unless a checkpoint says otherwise
    stream: StreamSpec
    clean: dict[str, StreamSpec]  # "validation", "test"
    study: LabelStudy
    control: Any  # an actor: tell(event), stop_wanted()

    @property
    def num_classes(self) -> int:
        return len(self.origin.class_names)


def train_worker(settings: dict[str, Any]) -> Any:
    """Train as one of the ranks; what rank 0 returns is the run's result."""
    job: Job = settings["job"]
    refused = ray.get(job.control.refusal.remote())
    if refused:  # a new attempt would fail as the last one did; to end well is to end at once
        return {"finished": False, "refused": refused}
    worker = None
    try:
        worker = Worker(job)
        return worker.run()
    except OwnersError:
        raise  # another rank is gone: worth a new attempt
    except PencilError as error:
        job.control.refuse.remote(str(error))
        raise
    finally:
        if worker is not None:
            worker.close()


class Worker:
    """One rank of a run, from its last checkpoint on."""

    def __init__(self, job: Job) -> None:
        self.job, config = job, job.config
        self.ranks = Ranks.meet(config.workers.timeout_s)
        self.device = ray.train.torch.get_device()
        settle(config, self.device)
        saved = _last_checkpoint(job)
        self.manifest = saved.labels if saved else job.labels
        self.progress = saved.progress if saved else Progress()
        self.record = saved.record if saved else []
        self.scratch = claim(config.workers.scratch, "labels")
        self.model = build_model(config, job.num_classes, self.device)
        self.stepper = self._stepper(saved)
        parts = owned_parts(self.manifest.layout.num_parts, self.ranks.rank, self.ranks.world)
        self.table = LabelTable.restore(self.manifest, self.scratch, parts, job.origin.class_names)
        self.owners = Owners(
            self.table,
            self.ranks.rank,
            self.ranks.world,
            timeout_s=config.workers.timeout_s,
            device=self.device,
        )
        local = config.workers.in_process
        self.stream = Stream(job.stream, self.ranks.rank, self.ranks.world, in_process=local)
        self.preparation = Preparation(config, self.device, self.stream.name_problem)
        self.clean_readers = {
            name: CleanReader(spec, self.ranks.rank, self.ranks.world, self.preparation.bring, local)
            for name, spec in job.clean.items()
        }
        self.clean = {name: CleanSet(reader) for name, reader in self.clean_readers.items()}
        self.recipe = Recipe.from_config(config.images)
        self.stop_watch = StopWatch(job.control)
        self.last_saved: Path | None = None
        self.num_epochs_here = 0

    def _stepper(self, saved: Saved | None) -> Stepper | StepGraph:
        if saved:
            self.model.load_state_dict(saved.weights)
        optimizer = build_optimizer(self.job.config, self.model, self.device)
        if saved:
            optimizer.load_state_dict(saved.optimizer)
        return build_stepper(self.job.config, self.model, optimizer, self.device, self.ranks.world)

    def run(self) -> dict[str, Any]:
        """Train to the end, or to where everybody was asked to stop."""
        config, options = self.job.config, self.job.config.optimizer
        batch = options.batch_per_worker * options.accumulation * self.ranks.world
        schedule = Schedule.from_config(config.stages, options, self.job.num_classes, batch)
        hooks = Hooks(
            epoch=self.epoch,
            prepare=self.preparation.prepare,
            save=self.save,
            close_epoch=self.close_epoch,
            log_step=self.log_step,
            total=self.ranks.total,
            add_up=self.ranks.add_up,
            join=self.ranks.join,
            name_unreadable=lambda num, names: self.tell("unreadable", num=num, names=names),
            stop=lambda: self.ranks.any(self.stop_watch.wanted),
        )
        pace = Pace(
            save_every=config.checkpoint.every_steps,
            stop_every=STOP_EVERY,
            warmup_steps=options.warmup_steps,
            max_unreadable_share=config.data.max_damaged_share,
        )
        self.tell("started", progress=self.progress, record=self.record, world=self.ranks.world)
        loop = Loop(self.stepper, schedule, self.owners, hooks, pace, config.run.seed)
        self.progress = loop.run(self.progress)
        return {"finished": self.progress.epoch == schedule.epochs, "record": self.record}

    # --- what the loop asks for ----------------------------------------------------------------------

    def epoch(self, epoch: int) -> Epoch:
        """This rank's batches, without the rows that the run visited before a crash."""
        resumed = epoch == self.progress.epoch and self.progress.step > 0
        seen = visited(self.manifest, epoch) if resumed else None
        batches = self.preparation.ahead(self.stream.batches(epoch, seen))
        return Epoch(self.stream.num_steps(epoch, seen), batches)

    def save(self, progress: Progress) -> None:
        """Snapshot the labels, and report them with the weights as one checkpoint."""
        self.tell("saving")
        self._report(progress, self._snapshot())

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        """Evaluate, study the labels, tell the driver, and make the epoch permanent."""
        epoch = progress.epoch - 1
        figures["rows_planned"] = self.stream.num_rows
        for name, clean in self.clean.items():
            bf16 = self.job.config.optimizer.precision == "bf16"
            right, seen = count_right(self.model, clean, self.recipe, self.device, bf16)
            figures[f"{name}_accuracy"] = accuracy(self.ranks.total(right), self.ranks.total(seen))
        manifest = self._snapshot()
        if manifest is not None:
            before = self.record[-1] if self.record else {}
            found = self.job.study.of(manifest, epoch, stage.moves_labels, before)
            self.record.append({"epoch": epoch, "stage": stage.name, **figures, **found.figures})
            self.tell("epoch", progress=progress, figures=self.record[-1], found=found)
        self._report(progress, manifest)
        self.num_epochs_here += 1
        if self.num_epochs_here == 1:  # all that lives on has been made
            set_aside()

    def log_step(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        self.tell("step", stage=stage.name, progress=progress, figures=figures)

    # --- checkpoints ---------------------------------------------------------------------------------

    def _snapshot(self) -> Manifest | None:
        """Put the parts that moved into the store; rank 0 gets the manifest over all ranks' parts."""
        manifests = self.ranks.gather(self.table.snapshot(self.manifest.store))
        if manifests is None:
            return None
        origin = self.job.origin
        return replace(merge(manifests), attempt=origin.attempt, catalogue=self.manifest.catalogue)

    def _report(self, progress: Progress, manifest: Manifest | None) -> None:
        if manifest is None:
            ray.train.report({}, checkpoint=None)
            return
        # Not in the folder of the labels: the upload may outlive this worker, and removes it.
        folder = claim(self.job.config.workers.scratch, "checkpoint")
        if self.job.config.workers.in_process:  # nothing is uploaded: Ray keeps the last one where it lies
            if self.last_saved is not None:
                shutil.rmtree(self.last_saved, ignore_errors=True)
            self.last_saved = folder
        optimizer = self.stepper.optimizer.state_dict()
        weights = self.model.state_dict()
        saved = Saved(self.job.origin, weights, optimizer, progress, manifest, self.record)
        write_checkpoint(folder, saved)
        ray.train.report(
            {"epoch": progress.epoch, "step": progress.step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"checkpoint-{progress.all_steps:09d}",
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def tell(self, kind: str, **what: Any) -> None:
        """Send word to the driver; only rank 0 speaks."""
        if self.ranks.rank == 0:
            tell(self.job.control, {"kind": kind, **what})

    def close(self) -> None:
        """Let go of threads, streams and the working copy."""
        gc.unfreeze()
        self.stop_watch.close()
        self.stream.close()
        for reader in self.clean_readers.values():
            reader.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _last_checkpoint(job: Job) -> Saved | None:
    """The newest checkpoint of this attempt, else the one that an earlier attempt left."""
    config, checkpoint = job.config, ray.train.get_checkpoint()
    if checkpoint is None and job.resume is not None:
        store = CheckpointStore(config.run.storage, config.run.name, job.origin.run)
        checkpoint = ray.train.Checkpoint(job.resume, store.filesystem()[0])
    if checkpoint is None:
        return None
    # A folder of our own: one that Ray shares between the ranks of a node (`as_directory`) is removed by the
    # first to have read it, also under the eyes of one that comes late.
    folder = claim(config.workers.scratch, "resume")
    try:
        saved = read_checkpoint(Path(checkpoint.to_directory(str(folder))))
        saved.origin.require(job.origin, checkpoint.path)
        return saved
    finally:
        shutil.rmtree(folder, ignore_errors=True)
