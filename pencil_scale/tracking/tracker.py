"""Harmless: what may fail without ending a run, such as a picture or a record for MLflow.

harmless = Harmless()
with harmless("drawing class transitions"):
    ...                              # an exception is logged once, with its reason, and the run continues

Tracker: what a run tells MLflow. Every call returns at once, whether the server stands or not.

    tracker = Tracker(plan, folder)                  # plan_tracking's; the folder keeps what is undelivered
    tracker.start_stage("pencil")                    # one parent run, one child a stage
    tracker.log_step("pencil", step, {"loss": 0.41})
    tracker.log_epoch("pencil", epoch, {"label_accuracy": 0.93})
    saved = tracker.state()                          # plan_tracking(config, state=saved): the same runs again
    tracker.finish("FINISHED", wait_s=60)

Words go to an outbox on disk, and a thread delivers them in order. What a crash leaves there, the next start
in the same folder delivers. Nothing is shown twice: a value carries the time at which it was said, so MLflow
knows a repeated delivery for the same value; and a step that a resumed run repeats is left out here.

Page copy: a file beside what MLflow knows of a finished run.

copy_page(config, tracking, "report.html", html)       # `tracking` is what the run's record holds
"""

import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pencil_scale.config.settings import Config
from pencil_scale.storage.urls import without_passwords
from pencil_scale.tracking.delivery import AwayError, Delivery, RefusedError
from pencil_scale.tracking.outbox import Outbox, Record, open_outbox
from pencil_scale.tracking.receiver import MOST_METRICS, Receiver
from pencil_scale.tracking.tracked_run import TrackedRun, TrackingError, plan_tracking

log = logging.getLogger(__name__)


class Harmless:
    """Logs the first failure of each kind, and swallows them all."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s failed (%s); training continues, later failures are not shown", what, reason)


Status = Literal["FINISHED", "FAILED", "KILLED"]
PARENT = "parent"
LONGEST_NAME = 250


class Tracker:
    """The voice of one run. Lives in one process, on one node; its arguments are plain and picklable."""

    def __init__(self, plan: TrackedRun, folder: str, every_s: float = 1.0) -> None:
        self._plan = plan
        self._harmless = Harmless()
        self._outbox = open_outbox(folder)
        self._open: str | None = None  # the stage now running
        self._num_repeated = 0
        self._end_former_life()
        self._start(PARENT, plan.name, params=plan.params, tags=plan.tags)
        self.log_json("config", plan.params)
        receiver = Receiver(plan.uri, self._outbox)
        self._delivery = Delivery(
            self._outbox, receiver, f"MLflow {without_passwords(plan.uri)}", every_s=every_s
        )

    def state(self) -> dict[str, Any]:
        """Give what a checkpoint must hold to go on in the same runs."""
        runs = dict(self._plan.runs)
        with self._harmless("reading the ids of the MLflow runs"):
            noted = {stage: self._outbox.noted(f"run:{self._owner(stage)}") for stage in self._stages()}
            runs = {stage: run for stage, run in noted.items() if run}
        return {"track": self._plan.track, "runs": runs}

    # --- figures ---------------------------------------------------------------------------------------

    def start_stage(self, stage: str) -> None:
        """Open the stage's run, or go on in it; the stage before it is over."""
        if stage == self._open:
            return
        if self._open is not None:
            self._end(self._open, "FINISHED")
        self._open = stage
        self._start(stage, f"{self._plan.name}-{stage}", tags={"stage": stage})

    def log_step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Tell the values of a step, in the stage's run, as `step/NAME`."""
        self.start_stage(stage)
        self._log(stage, "step", step, metrics)

    def log_epoch(self, stage: str, epoch: int, metrics: Mapping[str, float]) -> None:
        """Tell the values of an epoch as `epoch/NAME`: in the stage's run, and in the parent's curve."""
        self.start_stage(stage)
        self._log(stage, "epoch", epoch, metrics)
        self._log(PARENT, "epoch", epoch, metrics)

    def set_warning(self, name: str, text: str) -> None:
        """Warn in the log and, as the tag `warning.NAME`, on the run."""
        log.warning("%s: %s", name, text)
        self._say("tag", PARENT, name=_allowed(f"warning.{name}"), value=text)

    def set_tag(self, name: str, text: str) -> None:
        """Put a tag on the run."""
        self._say("tag", PARENT, name=_allowed(name), value=text)

    def log_picture(self, name: str, png: bytes) -> None:
        """Keep a picture with the run, as `pictures/NAME.png`."""
        self._outbox.add("file", {"owner": self._owner(PARENT), "path": f"pictures/{name}.png"}, png)

    def log_json(self, name: str, value: object) -> None:
        """Keep a record with the run, as `NAME.json`."""
        with self._harmless(f"writing {name}.json for MLflow"):
            text = json.dumps(value, indent=2, default=str)
            self._outbox.add("file", {"owner": self._owner(PARENT), "path": f"{name}.json"}, text.encode())

    # --- the trained network ---------------------------------------------------------------------------

    def log_model(
        self,
        backbone: str,
        weights: Mapping[str, Tensor],
        class_names: Sequence[str],
        image_size: int,
        alias: str | None = "current",
        **facts: Any,
    ) -> None:
        """Log the trained network, with its signature; register it if the config names it, under an alias.

        The network is exported as a graph, nothing in it is pickled. `facts` (the mean that was subtracted,
        say) go into its metadata, beside the class names. MLflow keeps the alias "latest" for itself. Without
        an alias, `move_alias` gives one later.
        """
        if alias is not None and not re.fullmatch(r"(?!(?i:latest|v\d+)$)[\w-]+", alias):
            raise TrackingError(
                f"alias '{alias}': letters, digits, '_' and '-' were expected, but not 'latest' or 'v1', "
                "which MLflow keeps for itself; take 'current'"
            )
        with self._harmless("writing the model for MLflow"):
            path = self._write_weights(weights)
            self._say(
                "model",
                PARENT,
                file=path.name,
                sha256=_sha256(path),
                backbone=backbone,
                num_classes=len(class_names),
                image_size=image_size,
                register_as=self._plan.register_as,
                alias=alias,
                metadata={"class_names": list(class_names), "backbone": backbone, **facts},
            )

    def _write_weights(self, weights: Mapping[str, Tensor]) -> Path:
        path = self._outbox.folder / f"weights-{time.time_ns()}.pt"
        # Given a path, torch would write its name into the file, and so into its hash.
        with path.open("wb") as file:
            torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, file)
        return path

    def move_alias(self, alias: str = "current") -> None:
        """Move an alias of the registered model to the version that this run made."""
        if self._plan.register_as is not None:
            self._say("alias", PARENT, register_as=self._plan.register_as, alias=alias)

    def finish(self, status: Status = "FINISHED", wait_s: float = 60.0) -> int:
        """End the runs, wait so long at most for the server, and give how many records remain on disk."""
        if self._open is not None:
            self._end(self._open, status)
        self._end(PARENT, status)
        self._outbox.note("finished", self._plan.track)
        if self._num_repeated:
            log.info("%d values of steps already tracked were left out", self._num_repeated)
        with self._harmless("the last report to MLflow"):
            return self._delivery.finish(wait_s)
        return 0

    # --- words for the outbox --------------------------------------------------------------------------

    def _end_former_life(self) -> None:
        """A run begun anew in the folder of one that never ended: that one ended here."""
        former = self._outbox.noted("track")
        if former == self._plan.track:
            return
        if former is not None and self._outbox.noted("finished") != former:
            for stage in self._stages():
                if self._outbox.noted(f"started:{former}/{stage}"):
                    body = {"owner": f"{former}/{stage}", "status": "KILLED", "time": _now()}
                    self._outbox.add("end", body)
        if former is not None:
            self._outbox.forget(former)
        self._outbox.note("track", self._plan.track)

    def _start(self, stage: str, name: str, **known: Any) -> None:
        plan = self._plan
        self._outbox.note(f"started:{self._owner(stage)}", "yes")
        self._say(
            "start",
            stage,
            name=name,
            track=plan.track,
            stage=stage,
            experiment=plan.experiment,
            artifacts=plan.artifacts,
            parent=None if stage == PARENT else self._owner(PARENT),
            run_id=plan.runs.get(stage),
            **known,
        )

    def _end(self, stage: str, status: Status) -> None:
        self._say("end", stage, status=status)

    def _log(self, stage: str, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[_allowed(f"{axis}/{name}")] = float(value)
            except (TypeError, ValueError):
                log.warning("metric %s of %s %d is no number and not tracked: %r", name, axis, step, value)
        names = list(values)
        for first in range(0, len(names), MOST_METRICS):
            some = {name: values[name] for name in names[first : first + MOST_METRICS]}
            self._num_repeated += len(
                self._outbox.add_values("metrics", self._owner(stage), step, some, time=_now())
            )

    def _say(self, kind: str, stage: str, /, **body: Any) -> None:
        self._outbox.add(kind, {"owner": self._owner(stage), "time": _now(), **body})

    def _owner(self, stage: str) -> str:
        return f"{self._plan.track}/{stage}"

    @staticmethod
    def _stages() -> tuple[str, ...]:
        return "backbone", "pencil", "finetune", PARENT


def _allowed(name: str) -> str:
    """Spell a name as MLflow allows it; a class may be called anything."""
    return re.sub(r"[^\w/.\-: ]", "_", name)[:LONGEST_NAME]


def _now() -> int:
    return time.time_ns() // 1_000_000


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


OWNER = "page"


def copy_page(config: Config, tracking: Mapping[str, Any], name: str, page: str) -> str | None:
    """Keep a page with its run in MLflow; gives the reason where that cannot be done, or None."""
    run_id = tracking.get("runs", {}).get("parent")
    if run_id is None:
        return "MLflow knows no run of these labels"
    try:
        uri = plan_tracking(config, catalogue_version="", run_id="").uri
        with tempfile.TemporaryDirectory(prefix="pencil_scale-") as folder:
            outbox = Outbox(folder)
            try:
                outbox.note(f"run:{OWNER}", run_id)
                Receiver(uri, outbox)([Record(1, "file", {"owner": OWNER, "path": name}, page.encode())])
            finally:
                outbox.close()
    except (AwayError, RefusedError, TrackingError) as error:
        return str(error)
    return None
