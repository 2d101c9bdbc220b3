"""Narrator: turns the news of a run's workers into printed lines, and into figures and pictures for MLflow.

    narrator = Narrator(num_epochs=40, class_names=names, tracker=tracker)
    narrator.hear({"kind": "epoch", ...})

pencil    epoch 12/40   loss 0.1234   1,830 images/s   test 0.962   labels right 0.931   left 0:01:12

Pictures are PNG bytes, drawn without a window and without matplotlib's global state.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from pencil_scale.tracking.delivery import Harmless
from pencil_scale.tracking.tracker import Tracker

LINE_EVERY_S = 10.0
ACCURACIES = {
    "validation_accuracy": "validation",
    "test_accuracy": "test",
    "corrected_label_accuracy": "labels right",
}
REPORTING = "reporting to MLflow"
MOST_NUMBERS = 15  # classes; with more the cells are too small for a number
MOST_NAMES = 60
LONGEST_NAME = 20


class Narrator:
    """Receives every event of a run."""

    def __init__(
        self,
        num_epochs: int,
        class_names: tuple[str, ...],
        tracker: Tracker,
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
        """Report one event, by the method that is named after its kind."""
        getattr(self, f"_{event['kind']}")(**event)

    def _started(self, progress: Any, record: list[dict[str, Any]], world: int, **_: Any) -> None:
        at = f"epoch {progress.epoch + 1}, step {progress.step}" if progress.all_steps else "the start"
        self._line(f"training with {world} worker{'s' if world > 1 else ''} from {at}")
        self._record = list(record)
        for figures in record:  # which a driver that died may not have reported
            self._track_epoch(figures)

    def _failed(self, reasons: dict[int, str], **_: Any) -> None:
        for rank, reason in reasons.items():
            self._line(f"worker {rank} failed: {reason}")

    def _step(self, stage: str, progress: Any, figures: dict[str, float], **_: Any) -> None:
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
        if found.transitions is not None:
            self._draw(found.transitions, figures)
        self._saving()

    def _saving(self, **_: Any) -> None:
        """Write all records while the checkpoint is being saved: a resumed run does not repeat its steps."""
        with self._harmless(REPORTING):
            self._tracker.flush_soon()

    def _draw(self, transitions: Any, figures: dict[str, Any]) -> None:
        with self._harmless("the picture of class transitions"):
            title = f"after epoch {figures['epoch'] + 1}"
            picture = transition_picture(transitions, self._class_names, title)
            self._tracker.log_picture("class_transitions", picture)
        name = "corrected_label_accuracy"
        if name in figures:
            with self._harmless("the picture of the label accuracy"):
                known = [one for one in self._record if name in one]
                points = [
                    Point(one["epoch"] + 1, one[name], one.get(f"{name}_low"), one.get(f"{name}_high"))
                    for one in known
                ]
                stages = {one["stage"]: one["epoch"] for one in reversed(self._record)}
                picture = accuracy_picture(points, stages, known[0]["given_label_accuracy"])
                self._tracker.log_picture("label_accuracy", picture)

    def _unreadable(self, num: int, names: list[str], **_: Any) -> None:
        more = f"; and {num - len(names):,} more" if num > len(names) else ""
        text = f"{num:,} images cannot be decoded and have weight 0: {'; '.join(names)}{more}"
        self._warn("unreadable_images", text)

    def _warn(self, name: str, text: str) -> None:
        """Print it once; MLflow and the summary keep the last of its kind."""
        if name not in self.warnings:
            self._line(f"WARNING: {text}")
        self.warnings[name] = text
        with self._harmless(REPORTING):
            self._tracker.set_warning(name, text)

    def _track_epoch(self, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        with self._harmless(REPORTING):
            self._tracker.log_epoch(figures["stage"], figures["epoch"], numbers)

    def _epoch_line(self, figures: dict[str, Any]) -> str:
        done = figures["epoch"] + 1
        # The median: the first epoch may have compiled the network.
        left_s = median_low(self._seconds) * (self._num_epochs - done)
        parts = [
            f"{figures['stage']:<9} epoch {done}/{self._num_epochs}",
            f"loss {figures['loss']:.4f}",
            f"{figures['images_per_s']:,.0f} images/s",
        ]
        parts += [f"{word} {figures[name]:.3f}" for name, word in ACCURACIES.items() if name in figures]
        if "corrected_share" in figures:
            parts.append(f"changed {figures['corrected_share']:.1%}")
        minutes, seconds = divmod(round(left_s), 60)
        return "   ".join([*parts, f"left {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"])

    def _line(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._say(text)


# --- pictures ----------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The label accuracy after an epoch, with its 95 % interval if that is known."""

    epoch: int
    accuracy: float
    low: float | None = None
    high: float | None = None


def transition_picture(counts: ArrayLike, class_names: Sequence[str], title: str = "") -> bytes:
    """Draw which share of each given class became which corrected class.

    Colour follows the square root of the share, which shows the few per cent that moved.
    """
    given = np.asarray(counts, np.float64)
    if given.shape != (len(class_names), len(class_names)):
        raise ValueError(f"counts of shape {given.shape} for {len(class_names)} class names")
    total = given.sum(axis=1, keepdims=True)
    share = np.divide(given, total, out=np.zeros_like(given), where=total > 0)
    side = min(4.5 + 0.35 * len(class_names), 16.0)
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(share, cmap="viridis", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    figure.colorbar(image, label="share of the given class", shrink=0.8)
    axes.set_xlabel("corrected class")
    axes.set_ylabel("given class")
    axes.set_title(title, parse_math=False)
    if len(class_names) <= MOST_NAMES:
        names = [
            name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in class_names
        ]
        # A class may be called "$5 bags", which is not a formula.
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), names, parse_math=False)
    for row, column in np.argwhere(share > 0.0005) if len(class_names) <= MOST_NUMBERS else ():
        text, colour = f"{100 * share[row, column]:.1f}", "black" if share[row, column] > 0.4 else "white"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="x-small")
    return _png(figure)


def accuracy_picture(
    points: Sequence[Point], stages: Mapping[str, int] | None = None, given: float | None = None
) -> bytes:
    """Draw the label accuracy over the epochs, that of the given labels, and the start of each stage."""
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    epochs, accuracies, _, _ = zip(*points, strict=True) if points else ((), (), (), ())
    axes.plot(epochs, accuracies, marker=".", label="corrected")
    known = [(epoch, low, high) for epoch, _, low, high in points if low is not None and high is not None]
    if known:
        at, lows, highs = zip(*known, strict=True)
        axes.fill_between(at, lows, highs, alpha=0.25, label="95 % interval")
    if given is not None:
        axes.axhline(given, color="grey", linestyle="--", label="as given")
    for name, epoch in (stages or {}).items():
        axes.axvline(epoch, color="grey", linewidth=0.5)
        axes.annotate(name, (epoch, 1.0), (3, -3), "data", "offset points", va="top", fontsize="small")
    axes.set_xlabel("epoch")
    axes.set_ylabel("label accuracy")
    others = [low for _, low, _ in known] + ([] if given is None else [given])
    lowest = min([*accuracies, *others], default=0.0)
    axes.set_ylim(max(0.0, lowest - 0.05), 1.0)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
