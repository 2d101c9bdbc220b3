"""The pictures are checked by their pixels: what must be bright is bright, and odd names do no harm."""

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pencil_scale.tracking.narrator import ACCURACY, accuracy_picture, transition_picture


def pixels(png: bytes) -> NDArray[np.uint8]:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


def num_yellow(png: bytes) -> int:
    """Count the pixels in the colour of the share 1.0; the colour bar has a few, too."""
    return int((np.abs(pixels(png).astype(int) - [253, 231, 37]).max(axis=2) < 8).sum())


@pytest.mark.slow
def test_a_class_that_keeps_all_its_samples_is_a_bright_cell() -> None:
    names = [f"class {number}" for number in range(20)]
    whole, one, none = np.eye(20), np.zeros((20, 20)), np.zeros((20, 20))
    one[3, 4] = 7
    dark = num_yellow(transition_picture(none, names))
    cell = num_yellow(transition_picture(one, names)) - dark
    assert cell > 100
    assert num_yellow(transition_picture(whole, names)) - dark == pytest.approx(20 * cell, rel=0.05)


def test_names_may_hold_formulas_and_be_long() -> None:
    names = ["$5 bags", "$x^", "a_{", "\\frac", "n" * 500]
    assert pixels(transition_picture(np.eye(5), names, title="$epoch_")).shape[2] == 3


@pytest.mark.slow
def test_a_thousand_classes_are_a_picture_of_the_same_size() -> None:
    names = [str(number) for number in range(1000)]
    assert max(pixels(transition_picture(np.eye(1000), names)).shape) <= 1700


def epoch(number: int, low: float = 0.7, high: float = 0.7) -> dict[str, Any]:
    stage = "backbone" if number < 2 else "pencil"
    figures = {ACCURACY: 0.7, f"{ACCURACY}_low": low, f"{ACCURACY}_high": high, "given_label_accuracy": 0.64}
    return {"epoch": number, "stage": stage, **figures}


def test_a_curve_of_any_length_is_a_picture_of_the_same_size() -> None:
    epochs = [{"epoch": 0, "stage": "backbone"}, *(epoch(number) for number in range(1, 5))]
    sizes = {pixels(accuracy_picture(epochs[:num])).shape for num in (2, 3, 5)}
    assert len(sizes) == 1


def test_the_interval_shows() -> None:
    bare = [epoch(number, low=0.6 if number == 0 else 0.7) for number in range(5)]  # on the same scale
    sure = [epoch(number, low=0.6, high=0.8) for number in range(5)]
    assert (pixels(accuracy_picture(sure)) != pixels(accuracy_picture(bare))).any(axis=2).sum() > 1000
