"""Decisions: which class a label has, how sure it is, and whether it changed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.method.decisions import Decisions, decide, decide_by_evidence, label_distribution
from pencil_scale.method.evidence import NoiseModel, Predictions
from pencil_scale.storage.errors import PencilError


def logits_of(*shares: list[float]) -> np.ndarray:
    return np.log(np.array(shares, dtype=np.float32))


def test_a_label_with_more_weight_on_another_class_is_changed() -> None:
    found = decide(logits_of([0.7, 0.2, 0.1], [0.7, 0.2, 0.1]), np.array([0, 2]))
    assert found.corrected_class.tolist() == [0, 0]
    assert found.changed.tolist() == [False, True]
    assert found.num_changed == 1
    assert found.confidence == pytest.approx([0.7, 0.7])
    assert found.margin == pytest.approx([0.5, 0.5])
    assert found.score == pytest.approx([0.7, 0.1])


def test_a_tie_stays_with_the_given_class() -> None:
    found = decide(logits_of([0.4, 0.4, 0.2], [0.4, 0.4, 0.2]), np.array([0, 1]))
    assert found.corrected_class.tolist() == [0, 1]
    assert not found.changed.any()
    assert found.margin == pytest.approx([0, 0])


def test_an_unlabelled_row_is_decided_but_never_changed() -> None:
    found = decide(logits_of([0.1, 0.2, 0.7]), np.array([-1]))
    assert found.corrected_class.tolist() == [2]
    assert not found.changed[0]
    assert np.isnan(found.score[0])


def test_an_empty_table_is_accepted() -> None:
    assert decide(np.zeros((0, 3), np.float32), np.zeros(0, np.int64)).num_changed == 0


def test_logits_that_are_not_finite_are_refused_with_their_position() -> None:
    with pytest.raises(PencilError, match="of 1 row are not finite, first at position 1;"):
        decide(np.array([[0, 1], [np.nan, 1]], np.float32), np.array([0, 0]))


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), min_size=1), st.integers(0, 3)
)
def test_confidence_margin_and_score_are_shares(rows: list[list[float]], given_class: int) -> None:
    logits = np.array(rows, dtype=np.float32)
    found = decide(logits, np.full(len(rows), given_class))
    for figure in (found.confidence, found.margin, found.score):
        assert ((figure >= 0) & (figure <= 1)).all()
    assert (found.score <= found.confidence).all()
    assert (found.changed == (found.corrected_class != given_class)).all()
    assert label_distribution(logits) == pytest.approx(torch.tensor(logits).softmax(-1).numpy(), abs=1e-6)


NOISE = NoiseModel(temperature=1.0, replaced=0.3, wrong=0.2, wrong_low=0.15, wrong_high=0.25)


def by_evidence(shares: list[float], given: int, noise: NoiseModel = NOISE) -> Decisions:
    predictions = Predictions.from_logits(np.log([shares]))
    return decide_by_evidence(predictions, np.array([given], np.int32), noise)


def test_evidence_changes_a_label_only_if_the_odds_beat_the_given_class() -> None:
    # P(given, and it is right) is p * (0.7 + 0.3 / 3); P(drawn, and another class is right) is p * 0.3 / 3.
    sure = by_evidence([0.05, 0.9, 0.05], given=0)
    assert (sure.corrected_class[0], sure.changed[0]) == (1, True)
    right, rival, total = 0.05 * 0.8, 0.9 * 0.1, 0.05 * 0.8 + 0.95 * 0.1
    assert sure.score[0] == pytest.approx(right / total)
    assert sure.confidence[0] == pytest.approx(rival / total)
    assert sure.margin[0] == pytest.approx((rival - right) / total)
    unsure = by_evidence([0.2, 0.7, 0.1], given=0)  # 0.2 * 0.8 is more than 0.7 * 0.1
    assert (unsure.corrected_class[0], unsure.changed[0]) == (0, False)
    assert unsure.confidence[0] == unsure.score[0] == pytest.approx(0.16 / 0.24)


def test_a_raised_bar_keeps_labels_that_would_have_changed() -> None:
    barred = by_evidence([0.05, 0.9, 0.05], given=0, noise=replace(NOISE, min_log_odds=1.0))
    assert (barred.corrected_class[0], barred.changed[0]) == (0, False)
    assert barred.score[0] == barred.confidence[0] < 0.5
    assert barred.margin[0] == 0  # the other class is more likely, but not enough


def test_other_decisions_replace_only_some_rows() -> None:
    learned = decide(logits_of([0.1, 0.8, 0.1], [0.8, 0.1, 0.1]), np.array([0, 0]))
    both = learned.but(np.array([False, True]), by_evidence([0.05, 0.05, 0.9], given=0))
    assert both.corrected_class.tolist() == [1, 2]
    assert learned.corrected_class.tolist() == [1, 0]
    assert both.changed.tolist() == [True, True]
