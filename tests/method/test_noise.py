"""Label noise: how many labels it changes, and to which classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.method.noise import CIFAR10_FLIPS, asymmetric_noise, next_class_flips, symmetric_noise
from pencil_scale.storage.errors import PencilError

LABELS = np.arange(100_000) % 10


def test_symmetric_noise_may_draw_the_true_class_so_it_changes_nine_tenths_of_its_rate() -> None:
    made = symmetric_noise(LABELS, rate=0.5, num_classes=10, seed=1)
    assert made.rate_made == pytest.approx(0.45, abs=0.005)  # 0.5 * 9/10; five standard errors are 0.008
    assert made.rate_made == np.mean(made.noisy_class != LABELS)


def test_every_wrong_class_is_drawn_equally_often() -> None:
    made = symmetric_noise(np.zeros(100_000, int), rate=1.0, num_classes=10, seed=1)
    assert np.bincount(made.noisy_class, minlength=10) == pytest.approx(10_000, abs=500)


def test_asymmetric_noise_changes_only_the_confusable_classes() -> None:
    noisy = asymmetric_noise(LABELS, rate=0.4, flips=CIFAR10_FLIPS, seed=1).noisy_class
    for number in range(10):
        found = set(noisy[number == LABELS].tolist())
        assert found == {number, CIFAR10_FLIPS.get(number, number)}
    assert np.mean(noisy[LABELS == 9] == 1) == pytest.approx(0.4, abs=0.03)


def test_the_cifar10_flips_are_those_of_the_paper() -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    named = {names[a]: names[b] for a, b in CIFAR10_FLIPS.items()}
    assert named == {
        "truck": "automobile",
        "bird": "airplane",
        "deer": "horse",
        "cat": "dog",
        "dog": "cat",
    }


def test_the_last_class_flips_to_the_first() -> None:
    noisy = asymmetric_noise([0, 98, 99], rate=1.0, flips=next_class_flips(100), seed=0).noisy_class
    assert noisy.tolist() == [1, 99, 0]


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_the_same_seed_makes_the_same_noise(seed: int, rate: float) -> None:
    first = symmetric_noise(LABELS[:200], rate, 10, seed)
    again = symmetric_noise(LABELS[:200], rate, 10, seed)
    assert first.noisy_class.tolist() == again.noisy_class.tolist()
    assert first.rate_made <= 1


def test_an_empty_array_of_labels_is_accepted() -> None:
    assert symmetric_noise([], rate=0.5, num_classes=10, seed=1).rate_made == 0


@pytest.mark.parametrize(
    ("labels", "rate", "message"),
    [
        ([0, 10], 0.5, "ranges from 0 to 10"),
        ([-1], 0.5, "ranges from -1"),
        ([0], 1.5, "1.5"),
        ([0.5], 0.5, "float64"),
    ],
)
def test_impossible_labels_and_rates_are_refused(labels: list[float], rate: float, message: str) -> None:
    with pytest.raises(PencilError, match=message):
        symmetric_noise(labels, rate, num_classes=10, seed=0)
