"""Narrator: turns the workers' news into lines a person can read, and into what MLflow keeps.

pencil    epoch 12/40   loss 0.1234   1,830 images/s   test 0.962   labels right 0.931   left 0:01:12
"""

import time
from collections.abc import Callable
from statistics import median_low
from typing import Any

from pencil_scale.tracking.figures import Point, accuracy_picture, transition_picture
from pencil_scale.tracking.tracker import Harmless, Tracker

LINE_EVERY_S = 10.0
REPORTING = "reporting to MLflow"


class Narrator:
    """Hears every event of a run."""

    def __init__(
        self,
        num_epochs: int,
        class_names: tuple[str, ...],
        tracker: Tracker | None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._num_epochs, self._class_names = num_epochs, class_names
        self._tracker, self._say = tracker, say
        self._harmless = Harmless()
        self._record: list[dict[str, Any]] = []
        self._seconds: list[float] = []
        self._said_at = time.monotonic()
        self.warnings: dict[str, str] = {}

    def hear(self, event: dict[str, Any]) -> None:
        """Take one piece of news."""
        hear: dict[str, Callable[..., None]] = {
            "started": self._started,
            "step": self._step,
            "epoch": self._epoch,
            "failed": self._failed,
            "unreadable": self._unreadable,
        }
        hear[event["kind"]](**event)

    def _started(self, progress: Any, record: list[dict[str, Any]], world: int, **_: Any) -> None:
        at = f"epoch {progress.epoch + 1}, step {progress.step}" if progress.all_steps else "the start"
        self._line(f"training with {world} worker{'s' if world > 1 else ''} from {at}")
        self._record = list(record)
        for figures in record:  # what a driver that died may not have delivered
            self._track_epoch(figures)

    def _failed(self, reasons: dict[int, str], **_: Any) -> None:
        for rank, reason in reasons.items():
            self._line(f"worker {rank} failed: {reason}")

    def _step(self, stage: str, progress: Any, figures: dict[str, float], **_: Any) -> None:
        if self._tracker:
            with self._harmless(REPORTING):
                self._tracker.log_step(stage, progress.all_steps, figures)
        if time.monotonic() - self._said_at > LINE_EVERY_S:
            epoch = f"epoch {progress.epoch + 1}/{self._num_epochs}"
            self._line(f"{stage:<9} {epoch}   step {progress.step}   loss {figures['loss']:.4f}")

    def _epoch(self, figures: dict[str, Any], found: Any, **_: Any) -> None:
        self._record.append(figures)
        self._seconds.append(figures["epoch_s"])
        self._line(self._epoch_line(figures))
        self._track_epoch(figures)
        for name, text in found.warnings.items():
            self._warn(name, text)
        if self._tracker and found.transitions is not None:
            self._draw(self._tracker, found.transitions, figures)

    def _draw(self, tracker: Tracker, transitions: Any, figures: dict[str, Any]) -> None:
        with self._harmless("the picture of class transitions"):
            title = f"after epoch {figures['epoch'] + 1}"
            picture = transition_picture(transitions, self._class_names, title)
            tracker.log_picture("class_transitions", picture)
        if "corrected_label_accuracy" in figures:
            with self._harmless("the picture of the label accuracy"):
                tracker.log_picture("label_accuracy", _accuracy_curve(self._record))

    def _unreadable(self, num: int, names: list[str], **_: Any) -> None:
        more = f"; and {num - len(names):,} more" if num > len(names) else ""
        self._warn(
            "unreadable_images",
            f"images that cannot be decoded, and weigh nothing: {num:,}: {'; '.join(names)}{more}",
        )

    def _warn(self, name: str, text: str) -> None:
        """Say it once; MLflow and the summary keep the last of its kind."""
        if name not in self.warnings:
            self._line(f"WARNING: {text}")
        self.warnings[name] = text
        if self._tracker:
            with self._harmless(REPORTING):
                self._tracker.set_warning(name, text)

    def _track_epoch(self, figures: dict[str, Any]) -> None:
        if self._tracker:
            numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
            with self._harmless(REPORTING):
                self._tracker.log_epoch(figures["stage"], figures["epoch"], numbers)

    def _epoch_line(self, figures: dict[str, Any]) -> str:
        done = figures["epoch"] + 1
        left_s = median_low(self._seconds) * (
            self._num_epochs - done
        )  # the first may have compiled the network
        parts = [
            f"{figures['stage']:<9} epoch {done}/{self._num_epochs}",
            f"loss {figures['loss']:.4f}",
            f"{figures['images_per_s']:,.0f} images/s",
        ]
        shown = {"validation_accuracy": "validation", "test_accuracy": "test"}
        shown["corrected_label_accuracy"] = "labels right"
        parts += [f"{word} {figures[name]:.3f}" for name, word in shown.items() if name in figures]
        if "corrected_share" in figures:
            parts.append(f"changed {figures['corrected_share']:.1%}")
        return "   ".join([*parts, f"left {_clock(left_s)}"])

    def _line(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._say(text)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _accuracy_curve(record: list[dict[str, Any]]) -> bytes:
    name = "corrected_label_accuracy"
    known = [figures for figures in record if name in figures]
    points = [Point(f["epoch"] + 1, f[name], f.get(f"{name}_low"), f.get(f"{name}_high")) for f in known]
    stages = {figures["stage"]: figures["epoch"] for figures in reversed(record)}
    return accuracy_picture(points, stages, known[0]["given_label_accuracy"])
