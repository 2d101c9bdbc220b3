"""Which samples are watched and which labels are wrong on purpose."""

import uuid
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from catalogue_making import Bench, image, samples
from label_making import packed

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.roles import ALL, Roles, choose_roles, judges, planted_share, watched_share
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.evidence import NoiseModel
from pencil_scale.storage.errors import PencilError

NONE = np.zeros(0, np.int64)
AUTOMATIC = Evidence()


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    bench = Bench(tmp_path_factory.mktemp("roles"))
    bench.shard("a.tar", samples(range(3000)))
    return bench.index().catalogue


def test_watched_and_planted_samples_are_different_ones(catalogue: Catalogue) -> None:
    roles = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1)
    assert 450 < len(roles.watched) < 750
    assert 80 < len(roles.planted) < 160
    assert not np.isin(roles.planted, roles.watched).any()
    given = catalogue.read(0, 3000, ["noisy_class"])["noisy_class"].to_numpy()[roles.planted]
    assert (roles.planted_class != given).all()
    assert set(roles.planted_class.tolist()) == {0, 1, 2}


def test_roles_are_a_function_of_the_data_and_the_seed(catalogue: Catalogue) -> None:
    first, again, other = (choose_roles(catalogue, None, NONE, AUTOMATIC, seed) for seed in (1, 1, 2))
    assert first.encode() == again.encode()
    assert first.watched.tolist() == other.watched.tolist()  # decided by the images alone
    assert first.planted.tolist() != other.planted.tolist()
    decoded = Roles.decode(first.encode())
    assert decoded.threshold == first.threshold
    assert decoded.planted_class.tolist() == first.planted_class.tolist()


def test_pinned_rows_and_rows_outside_a_subset_have_no_role(catalogue: Catalogue) -> None:
    roles = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1)
    special = np.concatenate([roles.watched, roles.planted])
    pinned = choose_roles(catalogue, None, np.sort(special), AUTOMATIC, seed=1)
    assert not np.isin(np.concatenate([pinned.watched, pinned.planted]), special).any()
    subset = np.arange(0, 3000, 2)
    within = choose_roles(catalogue, subset, NONE, Evidence(watched=0.1, planted=0.1), seed=1)
    assert np.isin(np.concatenate([within.watched, within.planted]), subset).all()


def test_copies_of_an_image_are_watched_together(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    copies = [
        member
        for number in range(400)
        for member in ((f"{number:06d}.png", image(number // 4)), (f"{number:06d}.cls", b"%d" % (number % 3)))
    ]
    bench.shard("a.tar", copies)
    roles = choose_roles(bench.index().catalogue, None, NONE, Evidence(watched=0.3, planted=0), seed=1)
    groups, counts = np.unique(roles.watched // 4, return_counts=True)
    assert len(groups) > 10
    assert (counts == 4).all()


def test_the_trainings_of_a_run_watch_every_sample_once_and_copies_together(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    members = [
        member
        for number in range(900)
        for member in ((f"{number:06d}.png", image(number // 3)), (f"{number:06d}.cls", b"%d" % (number % 3)))
    ]
    bench.shard("a.tar", members)
    catalogue = bench.index().catalogue
    roles = choose_roles(catalogue, None, NONE, Evidence(folds=4, planted=0.2), seed=1)
    folds = [roles, *(fold for _, fold in roles.folds())]
    assert roles.trainings == len(folds) == 4
    assert sorted(row for fold in folds for row in fold.watched.tolist()) == list(range(900))
    for fold in folds:
        assert 120 < len(fold.watched) < 330
        assert (np.unique(fold.watched // 3, return_counts=True)[1] == 3).all()
        kept = ~np.isin(roles.planted, fold.watched)  # the same errors, but none that this training watches
        assert fold.planted.tolist() == roles.planted[kept].tolist()
        assert fold.planted_class.tolist() == roles.planted_class[kept].tolist()
    assert roles.threshold == ALL // 4
    assert Roles.decode(roles.encode()).crossed_by.tolist() == roles.crossed_by.tolist()
    taken_down = roles.but(roles.crossed[:5])
    assert sum(len(fold.watched) for _, fold in taken_down.folds()) == len(roles.crossed) - 5
    assert choose_roles(catalogue, None, NONE, Evidence(folds=4), 1, continued(catalogue)).trainings == 1
    pinned = choose_roles(catalogue, None, np.array([30]), Evidence(folds=4), seed=1)
    watched = np.concatenate([pinned.watched, pinned.crossed])
    assert sorted(set(range(900)) - set(watched.tolist())) == [30, 31, 32]  # two copies, trained as pinned


def test_a_threshold_only_falls(catalogue: Catalogue) -> None:
    shares = [watched_share(num, 10) for num in (100, 5_000, 20_000, 400_000, 10**6, 10**8)]
    assert shares == sorted(shares, reverse=True)
    assert watched_share(10**8, 10) * 10**8 == pytest.approx(20_000)
    assert watched_share(10**8, 1000) * 10**8 == pytest.approx(100_000)
    parent = choose_roles(catalogue, None, NONE, Evidence(watched=0.1, planted=0), seed=1)
    labels = continued(catalogue, parent.threshold)
    child = choose_roles(catalogue, None, NONE, Evidence(watched=0.5), seed=1, parent=labels)
    assert child.threshold == parent.threshold
    assert child.watched.tolist() == parent.watched.tolist()


def continued(
    catalogue: Catalogue, threshold: int = 0, trained: Any = (), predicted: Any = None, watched: Any = None
) -> Manifest:
    """The labels that a night starts from: rows that were visited, and what the network said of them."""
    labels = start_labels(catalogue, f"memory://{uuid.uuid4().hex}", 10.0, watched=watched)
    if len(trained):
        with TemporaryDirectory() as folder:
            table = LabelTable.restore(labels, folder)
            table.mark(trained, predicted, epoch=0)
            labels = table.snapshot()
    noise = asdict(NoiseModel(1.0, 0.1, 0.1, 0.05, 0.2, watched_below=float(threshold)))
    return replace(labels.for_new_run("tonight"), noise=noise if threshold else None)


def test_what_was_trained_on_is_never_watched_nor_is_a_copy_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    members = [
        member
        for number in range(900)
        for member in ((f"{number:06d}.png", image(number % 600)), (f"{number:06d}.cls", b"0"))
    ]
    bench.shard("a.tar", members)
    catalogue = bench.index().catalogue
    labels = continued(catalogue, trained=np.arange(300))  # without watched samples: rows 300 to 899 are new
    roles = choose_roles(catalogue, None, NONE, Evidence(watched=0.5), seed=1, parent=labels)
    assert 100 < len(roles.watched) < 200
    assert roles.watched.min() >= 300
    assert roles.watched.max() < 600  # rows 600 to 899 are copies of the first 300
    pinned = choose_roles(catalogue, None, np.arange(300), Evidence(watched=0.5), seed=1)
    assert pinned.watched.tolist() == roles.watched.tolist()  # pinned samples are trained on as well


def test_a_night_watches_the_whole_catalogue_and_plants_errors_only_where_it_trains(
    catalogue: Catalogue,
) -> None:
    parent = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1)
    labels, rows = continued(catalogue, parent.threshold), np.arange(0, 3000, 2)
    tonight = choose_roles(catalogue, rows, NONE, Evidence(planted=0.1), seed=1, parent=labels)
    assert tonight.watched.tolist() == parent.watched.tolist()
    assert np.isin(tonight.planted, rows).all()
    assert not np.isin(tonight.planted, parent.watched).any()
    later = replace(labels, first_epoch=9)
    again = choose_roles(catalogue, rows, NONE, Evidence(planted=0.1), seed=1, parent=later)
    assert again.planted.tolist() != tonight.planted.tolist()  # not the same ones every night


def test_a_night_plants_errors_only_in_labels_that_no_run_has_decided(catalogue: Catalogue) -> None:
    logits = np.eye(3)[np.arange(3000) % 3]
    decided = np.arange(2000)
    labels = continued(catalogue, 0, decided, packed(logits[decided]))
    roles = choose_roles(catalogue, None, NONE, Evidence(planted=0.2), seed=1, parent=labels)
    assert roles.planted.min() >= 2000
    assert len(roles.planted) > 100


def test_half_of_the_errors_of_a_night_follow_observed_confusions(catalogue: Catalogue) -> None:
    given = np.arange(3000) % 3
    parent = choose_roles(catalogue, None, NONE, Evidence(watched=0.3), seed=1)
    seen = np.arange(2000)
    logits = 5.0 * np.eye(3)[given] + 3.0 * np.eye(3)[(given + 1) % 3]  # each class looks like the next
    labels = continued(catalogue, parent.threshold, seen, packed(logits[seen]), parent.watched)
    roles = choose_roles(catalogue, None, NONE, Evidence(planted=0.2), seed=1, parent=labels)
    steps = (roles.planted_class - given[roles.planted]) % 3
    assert set(steps.tolist()) == {1, 2}
    assert (steps == 1).mean() == pytest.approx(0.75, abs=0.07)  # all of one half, and half of the other


def test_so_few_samples_that_nothing_can_be_measured_get_no_role(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(60)))
    few = bench.index().catalogue
    roles = choose_roles(few, None, NONE, AUTOMATIC, seed=1)
    assert (len(roles.watched), len(roles.planted)) == (0, 0)
    assert roles.unmeasured == "how many labels are wrong and what the repair gains"
    tonight = choose_roles(few, None, NONE, AUTOMATIC, seed=1, parent=continued(few))
    assert 5 < len(tonight.watched) < 20  # later nights add to them
    assert (len(tonight.planted), tonight.unmeasured) == (0, roles.unmeasured)
    bench.shard("b.tar", samples(range(60, 600)))
    catalogue = bench.index().catalogue
    more = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1)
    assert len(more.watched) > 60
    assert len(more.planted) >= 30
    assert more.unmeasured == ""
    hardly = choose_roles(catalogue, None, NONE, Evidence(planted=0.02), seed=1)
    assert (len(hardly.planted), hardly.unmeasured) == (0, "what the repair gains")


def test_samples_that_are_all_copies_of_one_image_are_refused_as_that(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    copies = [(f"{number:06d}.png", image(1)) for number in range(200)]
    labels = [(f"{number:06d}.cls", b"%d" % (number % 3)) for number in range(200)]
    bench.shard("a.tar", [member for pair in zip(copies, labels, strict=True) for member in pair])
    catalogue = bench.index().catalogue
    with pytest.raises(PencilError, match="all 200 samples are copies of one image"):
        choose_roles(catalogue, None, NONE, Evidence(folds=4), seed=1)


def test_shares_of_zero_choose_nothing(catalogue: Catalogue) -> None:
    roles = choose_roles(catalogue, None, NONE, Evidence(watched=0.0, planted=0.0), seed=1)
    assert (len(roles.watched), len(roles.planted)) == (0, 0)
    assert planted_share(10**6) == 0.01
    assert planted_share(1200) == 0.05
    assert planted_share(400) * 400 == 60  # of which 30 are needed
    assert planted_share(100) == 0.2


def test_cross_fitting_leaves_enough_errors_to_measure_a_gain(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(700)))
    catalogue = bench.index().catalogue
    for seed in range(1, 21):
        assert choose_roles(catalogue, None, NONE, Evidence(folds=2), seed).unmeasured == ""


def test_half_of_the_watched_samples_judge() -> None:
    half = judges(np.arange(10_000)).mean()
    assert half == pytest.approx(0.5, abs=0.02)
    assert ALL == 2**64
