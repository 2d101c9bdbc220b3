"""Pictures of what happens to the labels, as PNG bytes. Pure: no window, no global state of matplotlib.

transition_picture(counts, class_names)                        # counts[given, corrected]
accuracy_picture([Point(0, 0.64), Point(1, 0.71, 0.70, 0.72)], stages={"backbone": 0, "pencil": 1})
"""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

MOST_NUMBERS = 15  # classes, above which the cells are too small for a number
MOST_NAMES = 60
LONGEST_NAME = 20


class Point(NamedTuple):
    """The label accuracy at the end of an epoch, with its 95 % interval where that is known."""

    epoch: int
    accuracy: float
    low: float | None = None
    high: float | None = None


def transition_picture(counts: ArrayLike, class_names: Sequence[str], title: str = "") -> bytes:
    """Draw which share of every given class became which corrected class.

    Colour follows the square root of the share: the few per cent that moved are what one wants to see.
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
    _name_classes(axes, class_names)
    if len(class_names) <= MOST_NUMBERS:
        _write_numbers(axes, share)
    return _png(figure)


def accuracy_picture(
    points: Sequence[Point], stages: Mapping[str, int] | None = None, given: float | None = None
) -> bytes:
    """Draw the label accuracy over the epochs, where each stage began, and how good the given labels are."""
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [point.epoch for point in points], [point.accuracy for point in points], marker=".", label="corrected"
    )
    sure = [point for point in points if point.low is not None and point.high is not None]
    axes.fill_between(
        [point.epoch for point in sure],
        [point.low or 0.0 for point in sure],
        [point.high or 0.0 for point in sure],
        alpha=0.25,
        label="95 % interval" if sure else "_",
    )
    if given is not None:
        axes.axhline(given, color="grey", linestyle="--", label="as given")
    for name, epoch in (stages or {}).items():
        axes.axvline(epoch, color="grey", linewidth=0.5)
        axes.annotate(name, (epoch, 1.0), (3, -3), "data", "offset points", va="top", fontsize="small")
    axes.set_xlabel("epoch")
    axes.set_ylabel("label accuracy")
    axes.set_ylim(_lowest(points, given), 1.0)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return _png(figure)


def _lowest(points: Sequence[Point], given: float | None) -> float:
    values = [point.accuracy for point in points] + [point.low for point in points if point.low is not None]
    values += [given] if given is not None else []
    return max(0.0, min(values, default=0.0) - 0.05)


def _name_classes(axes: Axes, class_names: Sequence[str]) -> None:
    if len(class_names) > MOST_NAMES:
        return
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in class_names]
    # A class may be called "$5 bags": no name is read as a formula.
    axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)


def _write_numbers(axes: Axes, share: NDArray[np.float64]) -> None:
    for given, corrected in np.argwhere(share > 0.0005):
        value = share[given, corrected]
        colour = "black" if value > 0.4 else "white"
        axes.text(
            corrected, given, f"{100 * value:.1f}", ha="center", va="center", color=colour, fontsize="x-small"
        )


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
