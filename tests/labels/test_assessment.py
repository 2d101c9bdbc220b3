"""Watched samples and planted errors of a run whose truth is known."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from catalogue_making import Bench, sample
from label_making import packed

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.assessment import Assessment, assess
from pencil_scale.labels.columns import FREE, PLANTED, WATCHED
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.labels.roles import Roles, choose_roles
from pencil_scale.labels.start_labels import set_roles, start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.proof import Proof

NUM, CLASSES = 3000, 3
TRUE = np.arange(NUM) % CLASSES
ALL = range(NUM)
INDEXED: dict[tuple[float, range, bool], tuple[np.ndarray, Catalogue]] = {}


class Made(NamedTuple):
    catalogue: Catalogue
    given: np.ndarray
    roles: Roles
    found: Assessment


def run(
    folder: Path,
    noise: float,
    skill: float,
    evidence: Evidence,
    learned: float = 0.0,
    rows: range = ALL,
    clean: range = range(0),
    confused: bool = False,
    proof: Proof | None = None,
) -> Made:
    """Index noisy samples, give them roles, and predict each as a network of this skill would.

    `learned` is how far the network has learned the planted errors. Other `rows` wait for a night.
    """
    given, catalogue = noisy_samples(folder, noise, clean, confused)
    roles = choose_roles(catalogue, None, np.zeros(0, np.int64), evidence, seed=1)
    planted = roles.planted, roles.planted_class
    manifest = start_labels(catalogue, str(folder / "store"), 10.0, planted=planted, watched=roles.watched)
    table = LabelTable.restore(manifest, folder / "table")
    logits = predicted(skill)
    if confused:  # the network has learned that too
        logits[np.arange(NUM), TRUE] = 0.0
        logits[np.arange(NUM), (TRUE + 1) % CLASSES] = np.random.default_rng(2).normal(-6, 2, NUM)
        logits[np.arange(NUM), (TRUE + 2) % CLASSES] = np.random.default_rng(3).normal(-9, 1, NUM)
    logits[roles.planted, roles.planted_class] += learned
    table.mark(np.array(rows), packed(logits[rows]), epoch=0)
    return Made(catalogue, given, roles, assess(table.snapshot(), catalogue, roles, proof=proof))


def noisy_samples(
    folder: Path, noise: float, clean: range = range(0), confused: bool = False
) -> tuple[np.ndarray, Catalogue]:
    """Index samples of which some have a wrong class (`confused`: the next one), but no clean row has.

    The same samples are indexed once, in the folder of the test that needs them first.
    """
    folder.mkdir(exist_ok=True)
    if (noise, clean, confused) in INDEXED:
        return INDEXED[noise, clean, confused]
    random, bench = np.random.default_rng(1), Bench(folder)
    wrong = (TRUE + (1 if confused else random.integers(1, CLASSES, NUM))) % CLASSES
    given = np.where(random.random(NUM) < noise, wrong, TRUE)
    given[clean] = TRUE[clean]
    bench.shard("a.tar", [member for row in range(NUM) for member in sample(row, int(given[row]))])
    INDEXED[noise, clean, confused] = given, bench.index().catalogue
    return INDEXED[noise, clean, confused]


def predicted(skill: float, seed: int = 2) -> np.ndarray:
    """The class logits of a network of this skill, for every row."""
    logits = np.random.default_rng(seed).normal(size=(NUM, CLASSES))
    logits[np.arange(NUM), TRUE] += skill
    return skill * logits


def test_a_good_network_repairs_and_the_gain_is_known(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=Evidence(watched=0.3, planted=0.1))
    noise, gain = made.found.noise, made.found.gain
    assert noise is not None
    assert gain is not None
    assert noise.wrong == pytest.approx((made.given != TRUE).mean(), abs=0.05)
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    before, after = (made.given == TRUE).mean(), (decided.corrected_class == TRUE).mean()
    assert after > 0.9
    assert gain.gain == pytest.approx(after - before, abs=0.08)
    assert 0 < gain.low < gain.gain < gain.high
    watched = made.roles.watched
    assert (decided.corrected_class == TRUE)[watched].mean() > 0.9


def test_planted_errors_are_not_published(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.0, skill=4.0, evidence=Evidence(watched=0.2, planted=0.2))
    labels = PublishedLabels(made.found.labels).rows(range(NUM))
    assert labels.noisy_class.tolist() == made.given.tolist()
    assert set(labels.role.tolist()) == {FREE, WATCHED}
    decided = labels.decide()
    assert (decided.corrected_class == TRUE)[made.roles.planted].all()
    assert decided.num_changed <= 3


def test_a_wrong_class_is_not_published_even_if_the_network_learned_it(tmp_path: Path) -> None:
    made = run(tmp_path, 0.3, skill=3.0, evidence=Evidence(watched=0.3, planted=0.2), learned=30.0)
    assert made.found.gain is not None
    assert made.found.gain.found < 0.05
    planted = made.roles.planted
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    assert (decided.corrected_class[planted] != made.roles.planted_class).all()
    assert decided.changed[planted].any()


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_network_that_guesses_changes_next_to_nothing_and_has_no_power(
    tmp_path: Path, noise: float
) -> None:
    made = run(tmp_path, noise, skill=0.2, evidence=Evidence(watched=0.3, planted=0.1))
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    assert decided.num_changed <= 3
    assert made.found.power is not None
    assert made.found.power < 0.2


def test_few_watched_samples_leave_the_repair_unsure_but_make_it(tmp_path: Path) -> None:
    few, enough = (
        run(tmp_path / str(share), 0.05, skill=3.5, evidence=Evidence(watched=share, planted=0.1))
        for share in (0.03, 0.5)
    )
    assert (few.found.unsure, enough.found.unsure) == (True, False)
    decided = PublishedLabels(few.found.labels).rows(range(NUM)).decide()
    assert decided.num_changed > 0  # for a person to look at


def test_of_labels_that_are_likely_wrong_those_that_surely_are_change(tmp_path: Path) -> None:
    made = run(tmp_path, 0.1, skill=3.0, evidence=Evidence(watched=0.05, planted=0.1))
    noise, gain = made.found.noise, made.found.gain
    assert noise is not None
    assert gain is not None
    assert noise.wrong_low < noise.wrong / 2
    assert not made.found.unsure
    assert gain.low > 0
    decided = PublishedLabels(made.found.labels).rows(range(NUM)).decide()
    assert 0.9 * noise.wrong_low < decided.changed.mean() <= noise.wrong_low
    assert (decided.corrected_class == TRUE)[decided.changed].mean() > 0.95


def test_clean_labels_stay_as_they_are_and_need_no_person(tmp_path: Path) -> None:
    for share in (0.03, 0.1, 0.5):
        made = run(tmp_path / str(share), 0.0, skill=2.5, evidence=Evidence(watched=share, planted=0.1))
        assert not made.found.unsure
        assert PublishedLabels(made.found.labels).rows(range(NUM)).decide().num_changed <= 3


def test_labels_that_are_mixed_up_systematically_are_proposed_and_their_gain_is_not_claimed(
    tmp_path: Path,
) -> None:
    made = run(tmp_path, 0.3, skill=4.0, evidence=Evidence(watched=0.3, planted=0.1), confused=True)
    assert made.found.patterned
    assert made.found.gain is None
    assert made.found.noise is not None
    num, of = made.found.contradicted
    assert made.found.noise.wrong_high < num / of
    decided = PublishedLabels(made.found.labels).rows(ALL).decide()
    assert (decided.corrected_class == TRUE).mean() > (made.given == TRUE).mean() + 0.05


@pytest.mark.parametrize("planted", [0.0, 0.1])
def test_labels_that_are_mixed_up_change_if_a_clean_set_proves_that_they_are_wrong(
    tmp_path: Path, planted: float
) -> None:
    evidence = Evidence(watched=0.3, planted=planted)
    proof = Proof(min_margin=2.0, changed=0.3, wrong_low=0.28, right=0.95, gain=0.28, low=0.25)
    made = run(tmp_path, 0.3, skill=4.0, evidence=evidence, confused=True, proof=proof)
    assert not made.found.patterned
    assert not made.found.unsure
    assert made.found.gain is not None
    decided = PublishedLabels(made.found.labels).rows(ALL).decide()
    before, after = (made.given == TRUE).mean(), (decided.corrected_class == TRUE).mean()
    assert after > 0.95
    assert 0.2 < made.found.gain.low < made.found.gain.gain < after - before
    assert (decided.confidence[decided.changed] > 0.5).all()


def crossed(folder: Path, noise: float, skill: float, memorised: float) -> tuple[Made, Assessment]:
    """A run of four trainings that memorise what they train on; also what the first alone concludes."""
    given, catalogue = noisy_samples(folder, noise)
    roles = choose_roles(catalogue, None, np.zeros(0, np.int64), Evidence(folds=4, planted=0.1), seed=1)
    manifests = []
    for number, some in ((0, roles), *roles.folds()):
        planted = some.planted, some.planted_class
        labels = start_labels(
            catalogue, str(folder / "store"), 10.0, None, f"r{number}", planted, some.watched
        )
        table = LabelTable.restore(labels, folder / f"table-{number}")
        logits, trained = predicted(skill, seed=number), np.setdiff1d(np.arange(NUM), some.watched)
        logits[trained, table.read(trained, "noisy_class")] += memorised
        table.mark(np.arange(NUM), packed(logits), epoch=0)
        manifests.append(table.snapshot())
    first, *others = manifests
    alone = assess(first, catalogue, roles)
    return Made(catalogue, given, roles, assess(first, catalogue, roles, others)), alone


def test_several_trainings_find_what_one_has_memorised(tmp_path: Path) -> None:
    made, alone = crossed(tmp_path, noise=0.2, skill=3.0, memorised=9.0)
    found, planted = made.found, made.roles.planted
    assert alone.noise is not None
    assert found.noise is not None
    assert found.noise.wrong_high - found.noise.wrong_low < alone.noise.wrong_high - alone.noise.wrong_low
    labels, before = (PublishedLabels(one.labels).rows(range(NUM)) for one in (found, alone))
    right, right_before = ((one.decide().corrected_class == TRUE).mean() for one in (labels, before))
    assert right > right_before + 0.05
    assert alone.gain is not None
    assert found.gain is not None
    assert found.gain.found > 0.65 > alone.gain.found
    assert found.gain.num_planted == NUM > 5 * len(planted)  # a wrong class is tried for every other row
    assert found.gain.gain == pytest.approx(right - (made.given == TRUE).mean(), abs=0.03)
    assert labels.noisy_class.tolist() == made.given.tolist()
    assert set(labels.role.tolist()) == {FREE, WATCHED}
    assert (labels.decide().corrected_class == TRUE)[planted].mean() > 0.9
    assert labels.is_unseen.all()
    assert np.flatnonzero(before.is_unseen).tolist() == made.roles.watched.tolist()
    for number, fold in made.roles.folds():  # each sample as predicted by the training that watched it
        expected = predicted(3.0, seed=number)[fold.watched].argmax(1)
        assert labels.predicted_class[fold.watched, 0].tolist() == expected.tolist()


def test_a_night_that_cannot_measure_has_seen_what_it_trains_on(tmp_path: Path) -> None:
    made, _ = crossed(tmp_path, noise=0.2, skill=3.0, memorised=9.0)
    off = Evidence(watched=0, planted=0)
    labels = night(tmp_path / "second", made, made.found.labels, 3.0, off).found.labels
    assert labels.noise == made.found.labels.noise
    is_unseen = PublishedLabels(labels).rows(range(NUM)).is_unseen
    assert np.flatnonzero(~is_unseen).tolist() == VISITED.tolist()


def test_without_evidence_nothing_is_concluded(tmp_path: Path) -> None:
    made = run(tmp_path, 0.3, 4.0, Evidence(watched=0, planted=0))
    assert made.found == Assessment(made.found.labels)
    assert made.found.labels.noise is None


# --- nights --------------------------------------------------------------------------------------------

FIRST = Evidence(watched=0.3, planted=0.1)
OLD, NEW = range(1500), range(1500, NUM)
VISITED = np.concatenate([np.arange(0, 1500, 5), np.array(NEW)])


def night(folder: Path, made: Made, parent: Manifest, skill: float, evidence: Evidence = FIRST) -> Made:
    """Continue some labels: a network of another skill visits some rows, and all that are watched."""
    carried, no_rows = parent.for_new_run(folder.name), np.zeros(0, np.int64)
    watched = choose_roles(made.catalogue, no_rows, no_rows, evidence, 1, carried).watched
    rows = np.setdiff1d(VISITED, watched)
    roles = choose_roles(made.catalogue, rows, no_rows, evidence, 1, carried)
    labels = set_roles(carried, (roles.planted, roles.planted_class), roles.watched)
    table, logits = LabelTable.restore(labels, folder), predicted(skill, seed=3)
    for some in (rows, roles.watched):
        table.mark(some, packed(logits[some]), epoch=0)
    start = labels if evidence.watched != 0 else None
    found = assess(table.snapshot(), made.catalogue, roles, start=start)
    return Made(made.catalogue, made.given, roles, found)


def decisions(labels: Manifest, rows: range) -> dict[str, bytes]:
    decided = PublishedLabels(labels).rows(rows).decide()
    return {name: values.tobytes() for name, values in vars(decided).items()}


def test_a_night_repairs_what_is_new_with_its_own_noise_and_leaves_the_rest(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=FIRST, rows=OLD)
    first, before = made.found.labels, made.found.noise
    second = night(tmp_path / "second", made, first, skill=3.0)
    noise, gain, labels = second.found.noise, second.found.gain, second.found.labels
    assert before is not None
    assert noise is not None
    assert gain is not None
    assert noise.temperature != before.temperature  # all labels would change by this model
    assert decisions(labels, OLD) == decisions(first, OLD)
    decided, given = PublishedLabels(labels).rows(NEW).decide(), made.given[NEW]
    repaired = (decided.corrected_class == TRUE[NEW]).mean() - (given == TRUE[NEW]).mean()
    assert repaired > 0.1
    assert gain.gain == pytest.approx(repaired, abs=0.08)
    assert labels.earlier_noise == (first.noise,)
    assert set(second.roles.planted.tolist()) <= set(NEW)
    assert second.found.num_new == len(NEW)

    third = night(tmp_path / "third", made, labels, skill=0.2)  # nothing is new, and the network guesses
    assert third.found.unmoved
    assert decisions(third.found.labels, ALL) == decisions(labels, ALL)


def test_clean_samples_that_a_night_adds_to_a_noisy_archive_stay(tmp_path: Path) -> None:
    made = run(tmp_path, 0.3, skill=4.0, evidence=FIRST, rows=OLD, clean=NEW)
    second = night(tmp_path / "second", made, made.found.labels, skill=2.0)
    assert second.found.noise is not None
    assert second.found.noise.wrong < 0.05
    assert decisions(second.found.labels, OLD) == decisions(made.found.labels, OLD)
    assert PublishedLabels(second.found.labels).rows(NEW).decide().num_changed <= 3


def test_a_night_that_cannot_measure_its_gain_leaves_the_decision_to_the_next(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=FIRST, rows=OLD)
    second = night(tmp_path / "second", made, made.found.labels, 1.0, Evidence(watched=0.3, planted=0))
    assert second.found.gain is None
    assert second.found.unmoved
    assert decisions(second.found.labels, ALL) == decisions(made.found.labels, ALL)
    third = night(tmp_path / "third", made, second.found.labels, skill=4.0)
    assert third.found.gain is not None
    assert decisions(third.found.labels, OLD) == decisions(made.found.labels, OLD)
    assert PublishedLabels(third.found.labels).rows(NEW).decide().changed.mean() > 0.2


def test_a_night_with_too_few_planted_errors_to_prove_its_gain_leaves_it_to_the_next(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.2, skill=4.0, evidence=FIRST, rows=OLD)
    few, many = (
        night(tmp_path / f"{share}", made, made.found.labels, 2.2, Evidence(watched=0.3, planted=share))
        for share in (0.03, 0.2)
    )
    assert (few.found.unmoved, many.found.unmoved) == (True, False)
    assert len(many.roles.planted) > 4 * len(few.roles.planted) > 120
    assert many.found.gain is not None
    assert decisions(few.found.labels, ALL) == decisions(made.found.labels, ALL)


def test_a_night_passes_the_threshold_on_and_watches_the_same_samples(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=FIRST, rows=OLD)
    more = Evidence(watched=0.5, planted=0.1)
    second = night(tmp_path / "second", made, made.found.labels, 4.0, more)
    third = night(tmp_path / "third", made, second.found.labels, 4.0, more)
    for tonight in (second, third):
        assert tonight.roles.watched.tolist() == made.roles.watched.tolist()
        assert tonight.found.labels.noise is not None
        assert tonight.found.labels.noise["watched_below"] == made.roles.threshold
        labels = PublishedLabels(tonight.found.labels).rows(ALL)
        assert np.flatnonzero(labels.role == WATCHED).tolist() == made.roles.watched.tolist()
        assert (labels.last_epoch[made.roles.watched] <= 0).all()
        assert labels.is_unseen[made.roles.watched].all()
        assert not (labels.role == PLANTED).any()


def test_a_night_without_evidence_decides_as_its_parent_did(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=FIRST)
    off = night(tmp_path / "second", made, made.found.labels, 4.0, Evidence(watched=0, planted=0)).found
    assert (off.noise, off.gain) == (None, None)
    assert (off.labels.noise, off.labels.earlier_noise) == (made.found.labels.noise, ())


def test_the_first_night_with_evidence_leaves_labels_that_were_learned_without_it(tmp_path: Path) -> None:
    made = run(tmp_path, noise=0.3, skill=4.0, evidence=Evidence(watched=0, planted=0))
    table = LabelTable.restore(start_labels(made.catalogue, str(tmp_path / "store"), 10.0), tmp_path / "old")
    table.mark(np.array(OLD), packed(predicted(4.0)[OLD]), epoch=0)
    tonight = night(tmp_path / "night", made, table.snapshot(), 4.0)
    assert tonight.found.noise is not None
    assert tonight.roles.watched.min() >= NEW.start
    decided = PublishedLabels(tonight.found.labels).rows(ALL).decide()
    assert (decided.corrected_class[OLD] == made.given[OLD]).all()  # no label had moved
    assert decided.changed[NEW].mean() > 0.2
