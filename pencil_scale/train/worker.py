"""Worker: one training process of a run, with its network, its share of the labels and of the samples.

Runs inside a Ray Train worker. `Worker` builds everything from the last checkpoint; `Loop` trains, and calls
the worker to read an epoch, to save, and to close an epoch. Ranks exchange small messages (counts, stop
requests, manifests) over a gloo group used by the training thread only; gradients go over NCCL or gloo,
labels over the owners' group.
"""

import gc
import math
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
from torch import nn

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Config
from pencil_scale.features.stream import FeatureStream
from pencil_scale.features.table import FeatureTable
from pencil_scale.labels.assessment import given_classes
from pencil_scale.labels.columns import PLANTED, Int64s
from pencil_scale.labels.exchange import OwnersError
from pencil_scale.labels.manifest import Manifest, merge, visited
from pencil_scale.labels.owners import Batch, Owners, owned_parts
from pencil_scale.labels.report import LabelStudy
from pencil_scale.labels.run_record import RunRecord
from pencil_scale.labels.start_labels import Classes
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.live_metrics import LiveMetrics, count_retries
from pencil_scale.stream.ray_tasks import relay_retries
from pencil_scale.stream.stream import StarvedError, Stream, StreamSpec
from pencil_scale.train.checkpoints import (
    CheckpointStore,
    Progress,
    Saved,
    fetch_checkpoint,
    write_checkpoint,
)
from pencil_scale.train.gate import still_rises, unready
from pencil_scale.train.loop import Loop, Readiness
from pencil_scale.train.network import where
from pencil_scale.train.preparation import (
    CleanSet,
    Preparation,
    build_network,
    claim_scratch,
    count_clean,
    featured_by,
    open_features,
    set_up_process,
)
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.step import forget_momentum
from pencil_scale.train.watch import CLEAN_COUNTS, Watch, predicts_plainly

STOP_EVERY = 8  # steps between two checks for a stop request: each is a collective of all ranks
LONGEST = 2  # times as long as planned the first stage may last
ANSWER_S = 10.0
BEAT_S = 10.0
PREEMPTION_EVERY_S = 3.0  # asking takes all ranks some milliseconds
STOP, REFUSED = "stop", "refused"  # notes on the control of a run: end now; why a new attempt is useless


@dataclass(frozen=True)
class Job:
    """What every worker of a run is given."""

    config: Config
    record: RunRecord  # of this attempt
    stream: StreamSpec
    clean: dict[str, StreamSpec]  # "validation", "test"
    watched: StreamSpec | None
    labels: Manifest  # the labels to start from, unless there is a checkpoint
    resume: str | None  # a checkpoint that an earlier attempt left
    control: Any  # the actor of `pencil_scale.train.control`


def train_worker(settings: dict[str, Any]) -> Any:
    """Train as one of the ranks; what rank 0 returns is the result of the run."""
    job: Job = settings["job"]
    refused = ray.get(job.control.noted.remote(REFUSED))
    if refused:  # a new attempt would fail as the last one did: return, so that Ray Train does not retry
        return {REFUSED: refused}
    with ExitStack() as opened:
        opened.enter_context(_beating(job.control))
        opened.callback(retries.log.removeHandler, relay_retries(job.control))
        try:
            return Worker(job, opened).run()
        except (OwnersError, retries.UnreachableError, StarvedError, PreemptedError):
            raise  # a rank has died, a store is down, or nodes are gone or leaving: worth a new attempt
        except PencilError as error:
            job.control.note.remote(REFUSED, str(error))
            raise


class PreemptedError(PencilError):
    """A node of the run is about to be taken away; all is saved, and the next attempt resumes elsewhere."""


@contextmanager
def _beating(control: Any) -> Iterator[None]:
    """Tell the driver all the time that this worker is alive, also while it compiles or waits."""
    ended, rank, place = threading.Event(), ray.train.get_context().get_world_rank(), where()

    def beat() -> None:
        while not ended.is_set():
            control.beat.remote(rank, place)
            ended.wait(BEAT_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Worker:
    """One rank of a run, from its last checkpoint on; the host of its training loop."""

    def __init__(self, job: Job, opened: ExitStack) -> None:
        """Build everything; `opened` releases it at the end, also if building fails."""
        self.job, self._opened, config = job, opened, job.config
        self.ranks = Ranks.meet(config.workers.timeout_s)
        self.live = LiveMetrics(job.record.name, self.ranks.rank)
        count_retries()
        self.device = ray.train.torch.get_device()
        set_up_process(config, self.device)

        saved = _last_checkpoint(job)
        self.manifest = saved.labels if saved else job.labels
        self.progress = saved.progress if saved else Progress()
        self.figures = saved.figures if saved else []
        features = open_features(config, job.record.catalogue_version, self._scratch("features"))
        self._build_network(features, saved)
        self._open_labels()
        self._open_samples(features, saved)
        self.study = LabelStudy(
            config.run.storage,
            job.record.catalogue_version,
            job.record.id,
            members=job.stream.subset,
            history=config.checkpoint.history,
            # With evidence, what labels learn is not what is published.
            max_class_loss=1.0 if job.watched else config.stages.pencil.max_class_loss,
        )
        self.ended_early = False  # because labels may not move
        self.is_averaged = saved.is_averaged if saved else False  # at the end of the last epoch
        self.leaving = ""  # nodes that are about to be taken away
        self.asked_at = time.monotonic()
        self.saved_in: Path | None = None
        self.saved = self.progress  # of the last checkpoint
        self.saved_at, self.saving_s = time.monotonic(), 0.0  # when that was, and how long it took
        self.snapshot: Manifest | None = None  # the last one, of all ranks
        self.unsaved: dict[str, list[Manifest]] = {}  # by checkpoint, until it is committed
        self.store = CheckpointStore(config.run.storage, config.run.name, job.record.id)
        # Hide what lives until the end from the garbage collector, which would search it while the GPU waits.
        gc.collect()
        gc.freeze()
        opened.callback(gc.unfreeze)

    def _scratch(self, name: str) -> Path:
        folder = claim_scratch(self.job.config.workers.scratch, name)
        self._opened.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _build_network(self, features: FeatureTable | None, saved: Saved | None) -> None:
        config, record = self.job.config, self.job.record
        self.model, self.stepper = build_network(
            config, len(record.class_names), self.device, self.ranks.world, record.weights, features
        )
        if saved:
            self.model.load_state_dict(saved.weights)
            self.stepper.optimizer.load_state_dict(saved.optimizer)
            if self.stepper.average is not None and saved.average is not None:
                self.stepper.average.load(saved.average, saved.average_steps)

    def _open_labels(self) -> None:
        """Restore the parts of the label table that this rank owns."""
        rank, world, timeout_s = self.ranks.rank, self.ranks.world, self.job.config.workers.timeout_s
        parts = owned_parts(self.manifest.layout.num_parts, rank, world)
        names = self.job.record.class_names
        self.table = LabelTable.restore(self.manifest, self._scratch("labels"), parts, names)
        owners = Owners(self.table, rank, world, timeout_s=timeout_s, device=self.device)
        self.owners = self._opened.enter_context(owners)

    def _open_samples(self, features: FeatureTable | None, saved: Saved | None) -> None:
        """Open this rank's share of the samples: those to train on, the clean sets, and the watched ones."""
        job, config = self.job, self.job.config
        self.stream = self._stream(job.stream, features)
        self.preparation = Preparation(config, self.device, self.stream.read.name_problem)
        self.prepare = self.preparation.prepare
        featured = featured_by(config, job.record.weights) if features is not None and job.clean else None
        self.clean = {name: self._clean_set(spec, featured) for name, spec in job.clean.items()}
        self.watch: Watch | None = None
        if job.watched is not None:
            samples: Callable[[], Iterator[Batch]] = (
                self._clean_set(job.watched).batches
                if features is None
                else partial(self._stream(job.watched, features).batches, 0)
            )
            planted = self._planted() if predicts_plainly(config.stages) else None
            self.watch = Watch(samples, self.preparation, self.ranks, self.owners, saved, planted)

    def _planted(self) -> tuple[Int64s, Classes]:
        """The rows of this rank with a planted error, and the classes that they had before."""
        rows = self.table.rows_with(PLANTED)
        catalogue = Catalogue.open(self.job.config.run.storage, self.job.record.catalogue_version)
        return rows, given_classes(catalogue, rows)

    def _stream(self, spec: StreamSpec, features: FeatureTable | None) -> Stream:
        rank, world = self.ranks.rank, self.ranks.world
        if features is not None:
            stream: Stream = FeatureStream(spec, features, rank, world, in_full=self.device.type == "cpu")
        else:
            local, control = self.job.config.workers.in_process, self.job.control
            stream = Stream(spec, rank, world, in_process=local, control=control)
        self._opened.callback(stream.close)
        return stream

    def _clean_set(self, spec: StreamSpec, featured: Callable[[Batch], Batch] | None = None) -> CleanSet:
        local = self.job.config.workers.in_process
        found = CleanSet(spec, self.ranks.rank, self.ranks.world, local, featured)
        self._opened.callback(found.close)
        return found

    def run(self) -> dict[str, Any]:
        """Train to the end, or until a stop is requested."""
        config, options = self.job.config, self.job.config.optimizer
        batch = options.batch_per_worker * options.accumulation * self.ranks.world
        num_classes = len(self.job.record.class_names)
        schedule = Schedule(config.stages, options, num_classes, batch)
        loop = Loop(
            self.stepper,
            schedule,
            self.owners,
            host=self,
            ranks=self.ranks,
            seed=config.run.seed,
            save_every=config.checkpoint.every_steps,
            stop_every=STOP_EVERY,
            warmup_steps=options.warmup_steps,
            max_unreadable_share=config.data.max_damaged_share,
        )
        self.report("started", progress=self.progress, record=self.figures, world=self.ranks.world)
        self.progress = loop.run(self.progress)
        if self.progress != self.saved:
            self.save(self.progress)
        if self.leaving:
            # Not before the checkpoint is committed: its upload ends with this process.
            ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
            raise PreemptedError(
                f"node {self.leaving} is being taken away; saved, to continue on other nodes"
            )
        done = self.progress.epoch == schedule.extended(self.progress.extended).epochs
        return {"finished": done or self.ended_early}

    def epoch(self, epoch: int) -> tuple[int, Iterable[Batch]]:
        """This rank's batches, without the rows that were visited before the run was interrupted."""
        resumed = epoch == self.progress.epoch and self.progress.step > 0
        seen = visited(self.manifest, epoch) if resumed else None
        batches = self.preparation.ahead(self.stream.batches(epoch, seen))
        return self.stream.num_steps(seen), batches

    def stop(self) -> bool:
        """Whether to save and end: a stop was requested, or a node is about to be taken away; rank 0 asks."""
        wanted = asks = False
        if self.ranks.rank == 0:
            # If the driver is gone, Ray Train ends the workers; otherwise it is unreachable for a moment.
            with suppress(ray.exceptions.RayError):
                wanted = bool(ray.get(self.job.control.noted.remote(STOP), timeout=ANSWER_S))
            is_watched = os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0"
            asks = is_watched and time.monotonic() - self.asked_at > PREEMPTION_EVERY_S
        found = int(self.ranks.total(wanted + 2 * asks))
        if found >= 2:
            self.asked_at = time.monotonic()
            info = ray.train.get_preemption_info()  # asked by all ranks together
            self.leaving = ", ".join(info.preempted_node_ids) if info else ""
        if found % 2:
            self.leaving = ""  # there is nothing to continue on other nodes
            return True
        return bool(self.leaving)

    def save(self, progress: Progress) -> None:
        """Snapshot the labels, and report them with the weights as one checkpoint."""
        self.report("saving")
        self._save_pair(progress, self._snapshot())

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, Any]) -> None:
        """Evaluate, study the labels, report to the driver, and save unless that costs too much time."""
        epoch = progress.epoch - 1
        figures["rows_planned"] = self.stream.num_rows
        self.is_averaged = stage.decay is not None
        for name, clean in self.clean.items():
            mine = count_clean(self._shown(), clean.batches(), self.preparation)
            counts = np.sum(self.ranks.gather(mine), axis=0)
            seen = int(counts[0].sum())
            figures[f"{name}_accuracy"] = int(counts[0, 0]) / seen if seen else math.nan
            if name == self.job.config.evidence.clean:
                figures[CLEAN_COUNTS] = counts.tolist()
        if self.watch is not None:
            figures |= self.watch.look(self._shown(), stage.name, epoch)
        manifest = self._snapshot()
        if self.watch is not None:
            self.watch.keep(progress.epoch, self._shown(), manifest)
        if self.ranks.rank == 0:
            before = self.figures[-1] if self.figures else {}
            found = self.study.of(manifest, epoch, stage.moves_labels, before)
            self.figures.append({"epoch": epoch, "stage": stage.name, **figures, **found.figures})
            self.report("epoch", progress=progress, figures=self.figures[-1], found=found)
            coverage = min(figures["rows_visited"] / max(figures["rows_planned"], 1), 1.0)
            done = {"epoch": progress.epoch, "coverage": coverage}
            self.live.set(done | {"unreadable_images": figures["rows_unreadable"]})
        if self._is_save_due():
            self._save_pair(progress, manifest)

    def _is_save_due(self) -> bool:
        """Whether saving after an epoch costs no more than its share of the time; rank 0 decides."""
        all_s = time.monotonic() - self.saved_at + self.saving_s
        wanted = self.ranks.rank == 0 and self.saving_s <= self.job.config.checkpoint.max_time_share * all_s
        return bool(self.ranks.total(wanted))

    def readiness(self, schedule: Schedule) -> Readiness:
        """Whether labels may move: from the weights of the best epoch, if the watched samples allow it.

        If the length of the first stage is automatic, it is extended while the network clearly improves.
        """
        watch, classes = self.watch, len(self.job.record.class_names)
        if watch is None:
            return "ready"
        seen = watch.agreements(first_stage=True)
        if not seen:  # a network that was trained before
            found = watch.look(self.model, "start", None)
            if reason := unready([found["watch_agreement"]], watch.num_selecting, classes):
                raise PencilError(f"labels may not move: {reason}")
            return "ready"
        planned = self.job.record.automatic.get("stages.backbone.epochs", 0)
        if len(seen) < LONGEST * planned and still_rises(seen, watch.num_selecting, classes):
            self.report("extended", epochs=schedule.epochs + 1)
            return "not yet"
        self.ended_early = bool(unready(seen, watch.num_selecting, classes, may_rise=planned > 0))
        if self.ended_early:
            return "never"
        best = watch.start_to_move()
        if best is not None and best.epoch < len(seen):
            self.model.load_state_dict(best.weights)
            forget_momentum(self.stepper.optimizer)
        return "ready"

    def report(self, kind: str, **what: Any) -> None:
        """Report an event to the driver, which only rank 0 does, or set the live metrics of this rank."""
        if kind == "live":
            self.live.set(what["figures"])
        elif self.ranks.rank == 0:
            self.job.control.report.remote(pickle.dumps({"kind": kind, **what}))

    def _shown(self) -> nn.Module:
        """What is evaluated, and may be published: the network, or its average."""
        average = self.stepper.average
        return average.network if average is not None and self.is_averaged else self.model

    def _snapshot(self) -> Manifest:
        """Store the label parts that moved; return the manifest of all ranks' parts."""
        if self.ranks.rank == 0:
            best = [self.watch.best.labels] if self.watch and self.watch.best else []
            # An unchanged part of the last snapshot is not stored again, even if no checkpoint names it.
            last = [self.snapshot] if self.snapshot else []
            needed = [self.job.labels, *best, *last]
            self.unsaved = self.store.sweep(self.job.record.attempt, self.unsaved, needed)
        self.ranks.gather(None)  # no rank writes before
        manifest = merge(self.ranks.gather(self.table.snapshot()))
        attempt, catalogue = self.job.record.attempt, self.manifest.catalogue
        self.snapshot = replace(manifest, attempt=attempt, catalogue=catalogue)
        return self.snapshot

    def _save_pair(self, progress: Progress, manifest: Manifest) -> None:
        started = time.monotonic()
        self._report_pair(progress, manifest)
        self.saved, self.saved_at = progress, time.monotonic()
        self.saving_s = self.saved_at - started

    def _report_pair(self, progress: Progress, manifest: Manifest) -> None:
        if self.ranks.rank != 0:
            ray.train.report({}, checkpoint=None)
            return
        # Not in the scratch folder of the labels: the upload may outlive this worker, which removes it.
        options, run = self.job.config.workers, self.job.record.id
        if self.saved_in is None or not options.in_process:  # in this process, Ray keeps the folder as it is
            self.saved_in = claim_scratch(options.scratch, "checkpoint")
        weights, optimizer = self.model.state_dict(), self.stepper.optimizer.state_dict()
        saved = Saved(run, weights, optimizer, progress, manifest, self.figures, is_averaged=self.is_averaged)
        if (average := self.stepper.average) is not None:
            steps = int(average.steps)
            saved = replace(saved, average=average.network.state_dict(), average_steps=steps)
        if self.watch is not None:
            best = self.watch.best
            is_this = best is not None and (best.epoch, 0) == (progress.epoch, progress.step)
            saved = replace(saved, best=None if is_this else best, agreed=self.watch.agreed)
        write_checkpoint(self.saved_in, saved)
        name = f"checkpoint-{progress.all_steps:09d}"
        named = [manifest, saved.best.labels] if saved.best else [manifest]
        self.unsaved = {**({} if options.in_process else self.unsaved), name: named}
        ray.train.report(
            {"epoch": progress.epoch, "step": progress.step},
            checkpoint=ray.train.Checkpoint.from_directory(self.saved_in),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )


def left_behind(job: Job) -> ray.train.Checkpoint | None:
    """The checkpoint that an earlier attempt left."""
    if job.resume is None:
        return None
    store = CheckpointStore(job.config.run.storage, job.config.run.name, job.record.id)
    return ray.train.Checkpoint(job.resume, store.filesystem()[0])


def _last_checkpoint(job: Job) -> Saved | None:
    """The newest checkpoint of this attempt, or the one that an earlier attempt left."""
    checkpoint = ray.train.get_checkpoint() or left_behind(job)
    if checkpoint is None:
        return None

    @contextmanager
    def copied() -> Iterator[str]:
        # Into a folder of this process. `as_directory` shares one between the ranks of a node, and the first
        # rank to finish removes it while another may still be reading.
        folder = claim_scratch(job.config.workers.scratch, "resume")
        try:
            yield checkpoint.to_directory(str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return fetch_checkpoint(copied, job.record.id)
