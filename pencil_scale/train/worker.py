"""Worker: one training process of a run, with its network, its share of the labels and of the samples.

Runs inside a Ray Train worker. `Worker` builds the parts from the last checkpoint; `Loop` trains, and calls
back to read an epoch, to save, and to close an epoch. Ranks exchange small messages (counts, stop requests,
manifests) over a gloo group used by the training thread only; gradients go over NCCL or gloo, labels over the
owners' group.
"""

import gc
import math
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
from pencil_scale.labels.manifest import Manifest, merge, visited
from pencil_scale.labels.owners import Owners, owned_parts
from pencil_scale.labels.report import LabelStudy
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.train.checkpoints import (
    CheckpointStore,
    Origin,
    Progress,
    Saved,
    read_checkpoint,
    write_checkpoint,
)
from pencil_scale.train.control import StopWatch, report_event
from pencil_scale.train.evaluation import CleanSet, count_right
from pencil_scale.train.loop import Epoch, Hooks, Loop, Pace
from pencil_scale.train.preparation import (
    Preparation,
    build_model,
    build_optimizer,
    build_stepper,
    claim_scratch,
    set_aside,
    settle,
)
from pencil_scale.train.ranks import Ranks

STOP_EVERY = 8  # steps between two checks for a stop request: each is a collective of all ranks


@dataclass(frozen=True)
class Job:
    """What every worker of a run is given."""

    config: Config
    origin: Origin  # which run this is; checkpoints of any other are refused
    resume: str | None  # a checkpoint that an earlier attempt left
    labels: Manifest  # the labels to start from, unless there is a checkpoint
    stream: StreamSpec
    clean: dict[str, StreamSpec]  # "validation", "test"
    study: LabelStudy
    control: Any  # the actor of `pencil_scale.train.control`

    @property
    def num_classes(self) -> int:
        return len(self.origin.class_names)


def train_worker(settings: dict[str, Any]) -> Any:
    """Train as one of the ranks; what rank 0 returns is the result of the run."""
    job: Job = settings["job"]
    refused = ray.get(job.control.refusal.remote())
    if refused:  # a new attempt would fail as the last one did: return, so that Ray Train does not retry
        return {"finished": False, "refused": refused}
    worker = None
    try:
        worker = Worker(job)
        return worker.run()
    except OwnersError:
        raise  # another rank has died: worth a new attempt
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
        rank, world = self.ranks.rank, self.ranks.world
        self.device = ray.train.torch.get_device()
        settle(config, self.device)

        saved = _last_checkpoint(job)
        self.manifest = saved.labels if saved else job.labels
        self.progress = saved.progress if saved else Progress()
        self.record = saved.record if saved else []

        self.scratch = claim_scratch(config.workers.scratch, "labels")
        self.model = build_model(config, job.num_classes, self.device)
        if saved:
            self.model.load_state_dict(saved.weights)
        self.optimizer = build_optimizer(config, self.model, self.device)
        if saved:
            self.optimizer.load_state_dict(saved.optimizer)
        self.stepper = build_stepper(config, self.model, self.optimizer, self.device, world)

        parts = owned_parts(self.manifest.layout.num_parts, rank, world)
        self.table = LabelTable.restore(self.manifest, self.scratch, parts, job.origin.class_names)
        self.owners = Owners(self.table, rank, world, timeout_s=config.workers.timeout_s, device=self.device)
        local = config.workers.in_process
        self.stream = Stream(job.stream, rank, world, in_process=local)
        self.preparation = Preparation(config, self.device, self.stream.name_problem)
        self.clean = {
            name: CleanSet(spec, rank, world, self.preparation.bring, local)
            for name, spec in job.clean.items()
        }
        self.stop_watch = StopWatch(job.control)
        self.last_saved: Path | None = None
        self.is_first_epoch = True  # of this process

    def run(self) -> dict[str, Any]:
        """Train to the end, or until a stop is requested."""
        config, options = self.job.config, self.job.config.optimizer
        batch = options.batch_per_worker * options.accumulation * self.ranks.world
        schedule = Schedule.from_config(config.stages, options, self.job.num_classes, batch)
        hooks = Hooks(
            epoch=self.epoch,
            prepare=self.preparation.prepare,
            save=self.save,
            close_epoch=self.close_epoch,
            log_step=lambda stage, progress, figures: self.report(
                "step", stage=stage.name, progress=progress, figures=figures
            ),
            name_unreadable=lambda num, names: self.report("unreadable", num=num, names=names),
            stop=lambda: self.ranks.total(self.stop_watch.wanted) > 0,
            ranks=self.ranks,
        )
        pace = Pace(
            save_every=config.checkpoint.every_steps,
            stop_every=STOP_EVERY,
            warmup_steps=options.warmup_steps,
            max_unreadable_share=config.data.max_damaged_share,
        )
        self.report("started", progress=self.progress, record=self.record, world=self.ranks.world)
        loop = Loop(self.stepper, schedule, self.owners, hooks, pace, config.run.seed)
        self.progress = loop.run(self.progress)
        return {"finished": self.progress.epoch == schedule.epochs, "record": self.record}

    def epoch(self, epoch: int) -> Epoch:
        """This rank's batches, without the rows that were visited before the run was interrupted."""
        resumed = epoch == self.progress.epoch and self.progress.step > 0
        seen = visited(self.manifest, epoch) if resumed else None
        batches = self.preparation.ahead(self.stream.batches(epoch, seen))
        return Epoch(self.stream.num_steps(epoch, seen), batches)

    def save(self, progress: Progress) -> None:
        """Snapshot the labels, and report them with the weights as one checkpoint."""
        self.report("saving")
        self._save_pair(progress, self._snapshot())

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        """Evaluate, study the labels, report to the driver, and save."""
        epoch = progress.epoch - 1
        figures["rows_planned"] = self.stream.num_rows
        config = self.job.config
        recipe, bf16 = Recipe.from_config(config.images), config.optimizer.precision == "bf16"
        for name, clean in self.clean.items():
            counts = count_right(self.model, clean.batches(), recipe, self.device, bf16)
            right, seen = (self.ranks.total(count) for count in counts)
            figures[f"{name}_accuracy"] = right / seen if seen else math.nan
        manifest = self._snapshot()
        if manifest is not None:
            before = self.record[-1] if self.record else {}
            found = self.job.study.of(manifest, epoch, stage.moves_labels, before)
            self.record.append({"epoch": epoch, "stage": stage.name, **figures, **found.figures})
            self.report("epoch", progress=progress, figures=self.record[-1], found=found)
        self._save_pair(progress, manifest)
        if self.is_first_epoch:  # every object that lives until the end has been made
            set_aside()
        self.is_first_epoch = False

    def _snapshot(self) -> Manifest | None:
        """Store the label parts that moved; rank 0 gets the manifest of all ranks' parts."""
        manifests = self.ranks.gather(self.table.snapshot())
        if manifests is None:
            return None
        origin = self.job.origin
        return replace(merge(manifests), attempt=origin.attempt, catalogue=self.manifest.catalogue)

    def _save_pair(self, progress: Progress, manifest: Manifest | None) -> None:
        if manifest is None:
            ray.train.report({}, checkpoint=None)
            return
        # Not in the scratch folder of the labels: the upload may outlive this worker, which removes it.
        folder = claim_scratch(self.job.config.workers.scratch, "checkpoint")
        if self.job.config.workers.in_process:  # nothing is uploaded: Ray keeps the last folder as it is
            if self.last_saved is not None:
                shutil.rmtree(self.last_saved, ignore_errors=True)
            self.last_saved = folder
        weights, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        write_checkpoint(folder, Saved(self.job.origin, weights, optimizer, progress, manifest, self.record))
        ray.train.report(
            {"epoch": progress.epoch, "step": progress.step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"checkpoint-{progress.all_steps:09d}",
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def report(self, kind: str, **what: Any) -> None:
        """Report an event to the driver; only rank 0 does."""
        if self.ranks.rank == 0:
            report_event(self.job.control, {"kind": kind, **what})

    def close(self) -> None:
        """Release threads, streams and the working copy of the labels."""
        gc.unfreeze()
        self.stop_watch.close()
        self.stream.close()
        for clean in self.clean.values():
            clean.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _last_checkpoint(job: Job) -> Saved | None:
    """The newest checkpoint of this attempt, or the one that an earlier attempt left."""
    config, checkpoint = job.config, ray.train.get_checkpoint()
    if checkpoint is None and job.resume is not None:
        store = CheckpointStore(config.run.storage, config.run.name, job.origin.run)
        checkpoint = ray.train.Checkpoint(job.resume, store.filesystem()[0])
    if checkpoint is None:
        return None
    # Into a folder of this process. `as_directory` shares one between the ranks of a node, and the first rank
    # to finish removes it while another may still be reading.
    folder = claim_scratch(config.workers.scratch, "resume")
    try:
        saved = read_checkpoint(Path(checkpoint.to_directory(str(folder))))
        saved.origin.require(job.origin, checkpoint.path)
        return saved
    finally:
        shutil.rmtree(folder, ignore_errors=True)
