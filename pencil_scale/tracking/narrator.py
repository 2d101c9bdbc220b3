"""Narrator: turns the events of a run's workers into printed lines, and into figures and pictures for MLflow.

    narrator = Narrator(num_epochs=40, class_names=names, tracker=tracker)
    narrator.hear({"kind": "epoch", ...})

pencil    epoch 12/40   loss 0.1234   1,830 images/s   test 0.962   labels right 0.931   ETA 0:01:12

Pictures are PNG bytes, drawn without a window and without matplotlib's global state.
"""

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median_low
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from pencil_scale.storage.errors import many
from pencil_scale.tracking.tracker import Tracker

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
SILENT_S = 25.0  # more than two beats of a worker
PICTURES_EVERY_S = 20.0  # drawing takes up to a second of a CPU, as long as an epoch of a small dataset
ACCURACY = "corrected_label_accuracy"
SHOWN = {
    "validation_accuracy": "validation",
    "test_accuracy": "test",
    "watch_agreement": "watched",
    ACCURACY: "labels right",
}
WAITS = {"data_wait_share": "data", "label_wait_share": "labels", "gpu_wait_share": "GPU"}  # of the time
MOST_NUMBERS = 15  # classes; with more the cells are too small for a number
MOST_NAMES = 60
LONGEST_NAME = 20


class Harmless:
    """Runs what may fail without ending a run, such as drawing a picture.

    with harmless("drawing class transitions"):
        ...                              # the first failure of each kind is logged, and the run continues
    """

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


class Untracked:
    """Takes what a tracker takes, and reports nothing."""

    def _ignore(self, *_: Any) -> None:
        pass

    log_step = log_epoch = log_picture = set_tag = flush_soon = _ignore


class Narrator:
    """Receives every event of a run."""

    def __init__(
        self,
        num_epochs: int,
        class_names: tuple[str, ...],
        tracker: Tracker | Untracked,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        later: int = 0,  # trainings that follow this one
    ) -> None:
        self._later = later
        self._num_epochs, self._class_names = num_epochs, class_names
        self._tracker, self._say, self._clock = tracker, say, clock
        self._harmless = Harmless()
        self._epochs: list[dict[str, Any]] = []  # the figures of all epochs
        self._said_at = clock()
        self._undrawn: tuple[int, ArrayLike] | None = None  # an epoch, and its class transitions
        self._drawn_at = -PICTURES_EVERY_S
        self._epoch_s: list[float] = []  # of the last epochs, with their evaluation and saving
        self._epoch_since: float | None = None  # None: the workers resumed in the middle of an epoch
        self._is_first = True  # since the workers started
        self._waits_for: set[str] = set()  # stores that do not answer
        self.warnings: dict[str, str] = {}

    def hear(self, event: dict[str, Any]) -> None:
        """Report one event, by the method that is named after its kind."""
        getattr(self, f"_{event['kind']}")(**event)

    def _started(self, progress: Any, record: list[dict[str, Any]], world: int, **_: Any) -> None:
        at = f"epoch {progress.epoch + 1}, step {progress.step}" if progress.all_steps else "the start"
        self._line(f"training with {many(world, 'worker')} from {at}")
        self._epochs, self._waits_for = list(record), set()
        self._epoch_s = [figures["epoch_s"] for figures in record]
        self._epoch_since, self._is_first = None if progress.step else self._clock(), True
        for figures in record:  # which a driver that died may not have reported
            self._track_epoch(figures)

    def _extended(self, epochs: int, **_: Any) -> None:
        self._num_epochs = epochs
        self._line("the network still improves on the watched samples: one more epoch before labels move")

    def _logged(self, text: str, waits_for: str = "", answers: str = "", **_: Any) -> None:
        """Pass on a line; of all processes that wait for a store, the first to say so is heard."""
        if waits_for in self._waits_for or (answers and answers not in self._waits_for):
            return
        self._waits_for ^= {waits_for or answers} - {""}
        self._line(text)

    def _failed(
        self, reasons: dict[str, str], places: Mapping[int, tuple[str, float]] | None = None, **_: Any
    ) -> None:
        for rank, (place, silent_s) in sorted((places or {}).items()):
            if silent_s > SILENT_S:
                self._line(f"worker {rank} on {place} has not been heard of for {silent_s:.0f} s")
            elif f"worker {rank}" in reasons and len(places or {}) > 1:
                self._line(f"worker {rank} was on {place}")
        for who, reason in reasons.items():
            self._line(f"{who} failed: {reason}")

    def _step(self, stage: str, progress: Any, figures: dict[str, float], **_: Any) -> None:
        self._tracker.log_step(stage, progress.all_steps, figures)
        if self._clock() - self._said_at > LINE_EVERY_S:
            epoch = f"epoch {progress.epoch + 1}/{self._num_epochs}"
            self._line(f"{stage:<9} {epoch}   step {progress.step}   loss {figures['loss']:.4f}")

    def _epoch(self, figures: dict[str, Any], found: Any, **_: Any) -> None:
        self._epochs.append(figures)
        self._time_epoch(figures)
        self._line(self._epoch_line(figures))
        self._track_epoch(figures)
        for name, text in found.warnings.items():
            self._warn(name, text)
        if found.transitions is None:  # labels do not move, or no longer
            self.draw()
        else:
            self._undrawn = figures["epoch"], found.transitions
            if self._clock() - self._drawn_at >= PICTURES_EVERY_S:
                self.draw()
        self._saving()

    def draw(self) -> None:
        """Draw the last state of the labels, unless it is drawn; to be called when the workers have ended."""
        if self._undrawn is None or isinstance(self._tracker, Untracked):
            return
        (epoch, transitions), self._undrawn = self._undrawn, None
        with self._harmless("the picture of class transitions"):
            picture = transition_picture(transitions, self._class_names, f"after epoch {epoch + 1}")
            self._tracker.log_picture("class_transitions", picture)
        if self._epochs and ACCURACY in self._epochs[-1]:  # none if the workers started again at the first
            with self._harmless("the picture of the label accuracy"):
                self._tracker.log_picture("label_accuracy", accuracy_picture(self._epochs))
        self._drawn_at = self._clock()

    def _saving(self, **_: Any) -> None:
        """Write what was reported: a run that resumes continues after its checkpoint."""
        self._tracker.flush_soon()

    def _unreadable(self, num: int, names: list[str], **_: Any) -> None:
        more = f"; and {num - len(names):,} more" if num > len(names) else ""
        text = f"{many(num, 'image')} cannot be decoded, weight set to 0: {'; '.join(names)}{more}"
        self._warn("unreadable_images", text)

    def _warn(self, name: str, text: str) -> None:
        """Print it once; MLflow and the summary keep the last of its kind."""
        if name not in self.warnings:
            self._line(f"WARNING: {text}")
        self.warnings[name] = text
        self._tracker.set_tag(f"warning.{name}", text)

    def _track_epoch(self, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._tracker.log_epoch(figures["stage"], figures["epoch"], numbers)

    def _epoch_line(self, figures: dict[str, Any]) -> str:
        number = figures["epoch"] + 1
        columns = [
            f"{figures['stage']:<9} epoch {number}/{self._num_epochs}",
            f"loss {figures['loss']:.4f}",
            f"{figures['images_per_s']:,.0f} images/s",
        ]
        waits = [
            f"{word} {figures[name]:.0%}" for name, word in WAITS.items() if figures.get(name, 0) >= 0.005
        ]
        columns += [f"waits {', '.join(waits)}"] if waits else []
        columns += [f"{word} {figures[name]:.3f}" for name, word in SHOWN.items() if name in figures]
        if "corrected_share" in figures:
            # With watched samples, evidence decides at the end which of them change.
            word = "moved" if "watch_agreement" in figures else "changed"
            columns.append(f"{word} {figures['corrected_share']:.1%}")
        if self._epoch_s:
            remaining_s = median_low(self._epoch_s[-5:]) * (self._num_epochs * (1 + self._later) - number)
            columns.append(f"ETA {timedelta(seconds=round(remaining_s))}")
        return "   ".join(columns)

    def _time_epoch(self, figures: dict[str, Any]) -> None:
        """Note how long an epoch took, without what the workers' start added to the first one."""
        now = self._clock()
        if self._epoch_since is not None:
            start_s = figures["start_s"] if self._is_first else 0.0  # readers start, the network compiles
            self._epoch_s.append(max(now - self._epoch_since - start_s, 0.0))
        self._epoch_since, self._is_first = now, False

    def _line(self, text: str) -> None:
        self._said_at = self._clock()
        self._say(text)


def transition_picture(counts: ArrayLike, class_names: Sequence[str], title: str = "") -> bytes:
    """Draw which share of each given class became which corrected class.

    Colour follows the square root of the share, which shows the few per cent that moved.
    """
    given = np.asarray(counts, np.float64)
    share = given / np.maximum(given.sum(axis=1, keepdims=True), 1)
    side = min(4.5 + 0.35 * len(class_names), 16.0)
    figure = Figure(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot(xlabel="corrected class", ylabel="given class")
    axes.set_title(title, parse_math=False)
    image = axes.imshow(share, cmap="viridis", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    figure.colorbar(image, label="share of the given class", shrink=0.8)
    if len(class_names) <= MOST_NAMES:
        names = [name[:LONGEST_NAME] for name in class_names]
        # A class may be called "$5 bags", which is not a formula.
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), names, parse_math=False)
    for row, column in np.argwhere(share > 0.0005) if len(class_names) <= MOST_NUMBERS else ():
        text, colour = f"{100 * share[row, column]:.1f}", "black" if share[row, column] > 0.4 else "white"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="x-small")
    return _png(figure)


def accuracy_picture(epochs: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the label accuracy over the epochs, that of the given labels, and the start of each stage."""
    known = [figures for figures in epochs if ACCURACY in figures]
    numbers = [figures["epoch"] + 1 for figures in known]
    accuracy, low, high = ([one[f"{ACCURACY}{end}"] for one in known] for end in ("", "_low", "_high"))
    given = known[0]["given_label_accuracy"]
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="label accuracy")
    axes.set_ylim(max(0.0, min([*low, given]) - 0.05), 1.0)
    axes.plot(numbers, accuracy, marker=".", label="corrected")
    axes.fill_between(numbers, low, high, alpha=0.25, label="95 % interval")
    axes.axhline(given, color="grey", linestyle="--", label="as given")
    for name, epoch in {one["stage"]: one["epoch"] for one in reversed(epochs)}.items():
        axes.axvline(epoch, color="grey", linewidth=0.5)
        axes.annotate(name, (epoch, 1.0), (3, -3), "data", "offset points", va="top", fontsize="small")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
