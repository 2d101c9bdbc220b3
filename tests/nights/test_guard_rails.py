"""Guard rails: what moved in a night is counted, and one that went beyond the limits is held."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from catalogue_making import samples
from label_making import pin_rows
from night_making import Nights

from pencil_scale.config.settings import NightlyJob
from pencil_scale.labels.report import Share
from pencil_scale.nights.guard_rails import Balance, Moves, count_moves, judge

LIMITS = NightlyJob()


@pytest.fixture
def bench(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_moves_are_counted_apart_for_old_and_new_rows_and_never_for_pinned_ones(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    carried = pin_rows(bench.labels(bench.version()), {5: 0})
    table = bench.table(carried)
    table.write([0, 1, 4, 5], np.float32([[0, 9, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0]]), epoch=0)
    labels = table.snapshot()
    rows, is_new = np.array([0, 1, 4, 5]), np.array([False, False, True, False])
    moves = count_moves(carried, labels, rows, is_new)
    assert (moves.old_changed, moves.old_repaired) == (Share(1, 2), Share(0, 2))
    assert moves.new_repaired == Share(1, 1)
    assert moves.between == {(0, 1): 1}


EVEN = Balance(("a", "b"), np.array([500, 500, 0]), np.array([50, 50, 0]))
CALM = Moves(Share(1, 100), Share(20, 100), Share(25, 100))


@pytest.mark.parametrize(
    ("moves", "balance", "accuracy", "said"),
    [
        (CALM, EVEN, (0.9, 0.89), None),
        (CALM, EVEN, (None, 0.1), None),
        (CALM, EVEN, (0.9, 0.8), "accuracy on the clean set fell from 0.9000 to 0.8000"),
        (
            replace(CALM, old_changed=Share(40, 100)),
            EVEN,
            (None, None),
            "40 of 100 old labels changed",
        ),
        (replace(CALM, new_repaired=Share(80, 100)), EVEN, (None, None), "80.0% of 100 new labels"),
        (
            CALM,
            replace(EVEN, tonight=np.array([500, 0, 0])),
            (None, None),
            "b 0 where about 250 were",
        ),
        (
            CALM,
            replace(EVEN, tonight=np.array([50, 0, 50])),
            (None, None),
            "no usable label 50 where",
        ),
        (CALM, replace(EVEN, tonight=np.array([2, 0, 0])), (None, None), None),  # chance, of so few
        (
            CALM,
            Balance(("a", "b"), np.array([900, 0, 0]), np.array([50, 50, 0]), frozenset({1})),
            (None, None),
            None,  # a class that the list has only now
        ),
    ],
)
def test_a_night_is_held_for_what_is_beyond_the_limits_and_for_nothing_else(
    moves: Moves, balance: Balance, accuracy: tuple[float | None, float | None], said: str | None
) -> None:
    reasons = judge(LIMITS, moves, balance, *accuracy)
    assert len(reasons) == (said is not None)
    assert said is None or reasons[0].startswith(said) or said in reasons[0]
