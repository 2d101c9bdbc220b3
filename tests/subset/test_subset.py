import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.subset.choice import allocate, pick, seeded_order

NAMES = ["ant", "bee"]


def keys(*sample_ids: object) -> np.ndarray:
    return np.array(
        [int.from_bytes(sample_key(str(name))[:8], "little") for name in sample_ids], dtype=np.uint64
    )


def balanced(num_samples: int, quotas: list[int], seed: int = 1) -> set[int]:
    """Pick from samples 0, 1, 2, ... whose classes alternate."""
    classes = np.arange(num_samples) % len(quotas)
    return set(pick(keys(*range(num_samples)), classes, np.array(quotas), seed).tolist())


def test_the_clothing1m_subset_is_balanced() -> None:
    quotas = allocate([100_000] * 14, ["x"] * 14, total=260_000)
    assert quotas.sum() == 260_000
    assert quotas.tolist() == [18_572] * 6 + [18_571] * 8


def test_each_class_fills_its_quota() -> None:
    members = balanced(10_000, [100] * 10)
    assert len(members) == 1000
    assert np.bincount([member % 10 for member in members]).tolist() == [100] * 10


def test_the_pick_depends_on_the_seed() -> None:
    assert balanced(1000, [50, 50]) == balanced(1000, [50, 50])
    assert balanced(1000, [50, 50]) != balanced(1000, [50, 50], seed=2)


@given(st.integers(10, 300), st.integers(1, 50))
def test_a_new_sample_replaces_at_most_one_member(num_samples: int, per_class: int) -> None:
    before, after = (balanced(count, [per_class, per_class]) for count in (num_samples, num_samples + 1))
    assert len(before - after) <= 1
    assert len(after - before) <= 1


def test_the_pick_does_not_depend_on_the_order_of_the_samples() -> None:
    names, classes = np.arange(500), np.arange(500) % 5
    shuffled = np.random.default_rng(0).permutation(500)
    quotas = np.full(5, 20)
    straight = pick(keys(*names), classes, quotas, seed=1)
    mixed = pick(keys(*names[shuffled]), classes[shuffled], quotas, seed=1)
    assert set(straight) == set(shuffled[mixed])


def test_merging_the_picks_of_two_halves_gives_the_pick_of_all_rows() -> None:
    all_keys, classes, quotas = keys(*range(1000)), np.arange(1000) % 4, np.full(4, 30)
    halves = [
        start + pick(all_keys[start : start + 500], classes[start : start + 500], quotas, 1)
        for start in (0, 500)
    ]
    union = np.concatenate(halves)
    merged = union[pick(all_keys[union], classes[union], quotas, 1)]
    assert merged.tolist() == pick(all_keys, classes, quotas, 1).tolist()


def test_unlabelled_and_unknown_rows_are_never_taken() -> None:
    members = pick(keys(*range(6)), np.array([-1, 0, -1, 0, 7, 1]), np.array([5, 5]), seed=1)
    assert members.tolist() == [1, 3, 5]


def test_the_order_uses_every_bit_of_a_key() -> None:
    sequence = seeded_order(np.arange(100_000, dtype=np.uint64), seed=1)
    assert len(np.unique(sequence)) == 100_000
    shares = [np.mean((sequence >> np.uint64(bit)) & np.uint64(1)) for bit in range(64)]
    assert shares == pytest.approx([0.5] * 64, abs=0.01)


def test_a_class_with_too_few_samples_is_refused_or_used_completely() -> None:
    remedy = "; ask for fewer, or set subset.on_shortage: take_all"
    with pytest.raises(PencilError, match=rf"class 1 \(bee\) has 5 of 10{remedy}"):
        allocate([20, 5], NAMES, per_class=10)
    assert allocate([20, 5], NAMES, per_class=10, on_shortage="take_all").tolist() == [10, 5]


@pytest.mark.parametrize("asked", [{}, {"per_class": 1, "total": 1}])
def test_per_class_and_total_are_alternatives(asked: dict[str, int]) -> None:
    with pytest.raises(PencilError, match="set exactly one"):
        allocate([5, 5], NAMES, **asked)
