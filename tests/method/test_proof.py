"""What a clean set proves about contradicted labels, against labels whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest
from crowd_making import CLASSES, Crowd, crowd, repaired

from pencil_scale.method.evidence import NoiseModel, Predictions, fit_noise, judge, net_gain, proven_gain
from pencil_scale.method.proof import MARGINS, SURENESS, Proof, count, margins, no_counts, prove, shift

_MODEL = NoiseModel(temperature=1.0, replaced=0.1, wrong=0.09, wrong_low=0.05, wrong_high=0.1)


def ambiguous(num: int, seed: int = 1) -> Crowd:
    """Samples that people mistake for a second class as often as each looks like it; so does a network."""
    random = np.random.default_rng(seed)
    true = random.integers(CLASSES, size=num)
    second = (true + random.integers(1, CLASSES, num)) % CLASSES
    likeness = random.beta(0.6, 2.0, num) / 2
    given = np.where(random.random(num) < likeness, second, true)
    logits = random.normal(size=(num, CLASSES))
    logits[np.arange(num), true] += 8 + np.log(1 - likeness)
    logits[np.arange(num), second] += 8 + np.log(likeness)
    return Crowd(true, given, Predictions.from_logits(logits))


def counted(predictions: Predictions, classes: np.ndarray) -> np.ndarray:
    return count(np.concatenate([predictions.classes, predictions.log_p], 1), classes, CLASSES)


def proof_of(clean: Crowd, watched: Crowd) -> Proof | None:
    return prove(counted(clean.predictions, clean.true), counted(watched.predictions, watched.given))


def test_samples_are_counted_by_the_margin_against_their_class_and_by_how_sure_the_network_is() -> None:
    log_p = np.log([0.1, 0.5, 0.5, 1.0, 0.5])
    predicted = np.stack([[1, 1, 0, 1, 0], [0, 0, 1, 0, 1], log_p, log_p - [1, 1, 0.7, 1, 0]], 1)
    by_margin, by_sureness = count(predicted, np.array([1, 1, 1, 1, 1]), 2)
    even = np.searchsorted(SURENESS, 0.0, side="right")
    assert (by_sureness[0], by_sureness[even], by_sureness[-1], by_sureness.sum()) == (1, 3, 1, 5)
    just, more = np.searchsorted(MARGINS, [0.1, 0.7])
    assert (by_margin[0], by_margin[just], by_margin[more], by_margin.sum()) == (3, 1, 1, 5)


def test_classes_that_were_not_kept_are_equally_likely_and_less_than_those_that_were() -> None:
    classes, given = np.array([[3, 1], [3, 1], [3, 1]]), np.array([1, 0, 0])
    log_p = np.log([[0.6, 0.2], [0.6, 0.2], [0.5, 0.1]])
    found = margins(classes, log_p, given, 6)  # 0.05 each in the second row; in the third 0.1
    assert found == pytest.approx(np.log([3, 12, 5]))
    assert (found[0] < found[1]) & (found[2] <= np.log(5) + 1e-9)


def test_a_clean_set_proves_errors_that_follow_the_image() -> None:
    clean, watched, others = ambiguous(2000, seed=3), ambiguous(2500, seed=2), ambiguous(8000)
    model, proof = fit_noise(watched.predictions, watched.given), proof_of(clean, watched)
    assert proof is not None
    given, without = (others.given == others.true).mean(), (repaired(others, model) == others.true).mean()
    with_it = (repaired(others, replace(model, min_margin=proof.min_margin)) == others.true).mean()
    assert given < 0.9
    assert with_it > without + 0.03
    assert 0 < proof.low < proof.gain <= with_it - given + 0.01
    assert 0 < proof.wrong_low < 1 - given
    assert 0.5 < proof.right < 1


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("skill", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("seen_clean", [150, 3000])
@pytest.mark.parametrize("easier", [0.0, 2.0])
def test_a_clean_set_even_an_easier_one_lets_no_weak_network_make_labels_worse(
    noise: float, skill: float, seen_clean: int, easier: float
) -> None:
    clean, watched = crowd(seen_clean, 0, skill + easier, seed=3), crowd(2500, noise, skill, seed=2)
    others, proof = crowd(8000, noise, skill), proof_of(clean, watched)
    model = fit_noise(watched.predictions, watched.given)
    if proof is not None:
        model = replace(model, min_margin=proof.min_margin)
    before, after = (others.given == others.true).mean(), (repaired(others, model) == others.true).mean()
    assert after >= before - 0.002


def test_a_clean_set_of_samples_that_the_network_finds_easy_proves_nothing() -> None:
    watched, clean = ambiguous(2500), ambiguous(6000, seed=3)
    easiest = np.argsort(-clean.predictions.log_p[:, 0])[:3000]
    chosen = Crowd(clean.true[easiest], clean.given[easiest], clean.predictions.take(easiest))
    assert proof_of(clean, watched) is not None
    assert proof_of(chosen, watched) is None
    seen = [counted(some.predictions, some.given) for some in (clean, chosen, watched)]
    assert shift(seen[0], seen[2]) < 0 < shift(seen[1], seen[2])


@pytest.mark.parametrize(("num_watched", "num_clean", "share_hard"), [(500, 500, 0.2), (5000, 2000, 0.12)])
def test_right_labels_are_not_proven_wrong_by_a_clean_set_without_hard_images(
    num_watched: int, num_clean: int, share_hard: float
) -> None:
    def some(num: int, share_hard: float, seed: int) -> Crowd:
        num_hard = round(num * share_hard)
        easy, hard = crowd(num - num_hard, 0, 4.0, seed), crowd(num_hard, 0, 1.2, seed + 100)
        true, given = (np.concatenate(both) for both in zip(easy[:2], hard[:2], strict=True))
        return Crowd(true, given, Predictions.join([easy.predictions, hard.predictions]))

    for seed in range(20):
        watched = some(num_watched, share_hard, seed)
        assert proof_of(some(num_clean, 0.0, seed + 50), watched) is None
    alike = (some(num, share_hard, seed=num) for num in (900, 800))
    assert shift(*(counted(one.predictions, one.true) for one in alike)) < 0


def test_a_clean_set_of_which_nothing_was_seen_proves_nothing() -> None:
    watched = ambiguous(2500)
    seen = counted(watched.predictions, watched.given)
    assert prove(no_counts(), seen) is None
    assert prove(counted(watched.predictions, watched.true), no_counts()) is None


def test_a_proven_gain_shrinks_with_the_share_of_labels_that_change() -> None:
    proof = Proof(min_margin=2.0, changed=0.2, wrong_low=0.14, right=0.75, gain=0.1, low=0.08)
    shares = (0.0, 0.1, 0.3)
    found = [net_gain(np.ones(9, bool), np.ones(9, bool), share, 999, _MODEL) for share in shares]
    none, half, more = (proven_gain(proof, *both) for both in zip(found, shares, strict=True))
    assert none.gain == none.high == 0
    assert (half.gain, half.low) == (0.05, 0.04)
    assert (more.gain, more.low) == pytest.approx((0.0, -0.02))  # what was not proven counts as errors


def test_a_proven_change_comes_before_all_others_and_has_likely_classes() -> None:
    watched = ambiguous(2500)
    fitted = fit_noise(watched.predictions, watched.given)
    model = replace(fitted, min_margin=1.0, proven_right=0.8)
    judged = judge(watched.predictions, watched.given, model)
    proven = watched.predictions.margins(watched.given) > 1
    assert judged.log_odds[proven].min() > judged.log_odds[~proven].max()
    assert (judged.rival_right[proven] > judged.given_right[proven]).all()
    assert judged.rival_right[proven].max() == 0.8
    assert (judged.rival == watched.predictions.classes[:, 0])[proven].all()
