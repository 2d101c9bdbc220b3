"""Which samples are watched and which labels are wrong on purpose."""

from pathlib import Path

import numpy as np
import pytest
from catalogue_making import Bench, image, samples

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.roles import ALL, Roles, choose_roles, judges, planted_share, watched_share

NONE = np.zeros(0, np.int64)
AUTOMATIC = Evidence(watched=None, planted=None)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    bench = Bench(tmp_path_factory.mktemp("roles"))
    bench.shard("a.tar", samples(range(3000)))
    return bench.index().catalogue


def test_watched_and_planted_samples_are_different_ones(catalogue: Catalogue) -> None:
    roles = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1)
    assert 450 < len(roles.watched) < 750
    assert 50 < len(roles.planted) < 130
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


def test_a_threshold_only_falls(catalogue: Catalogue) -> None:
    shares = [watched_share(num, 10) for num in (100, 5_000, 20_000, 400_000, 10**6, 10**8)]
    assert shares == sorted(shares, reverse=True)
    assert watched_share(10**8, 10) * 10**8 == pytest.approx(20_000)
    assert watched_share(10**8, 1000) * 10**8 == pytest.approx(100_000)
    parent = choose_roles(catalogue, None, NONE, Evidence(watched=0.1, planted=0), seed=1)
    child = choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1, highest=parent.threshold)
    assert child.watched.tolist() == parent.watched.tolist()
    assert len(choose_roles(catalogue, None, NONE, AUTOMATIC, seed=1, highest=0).watched) == 0


def test_shares_of_zero_choose_nothing(catalogue: Catalogue) -> None:
    roles = choose_roles(catalogue, None, NONE, Evidence(watched=0.0, planted=0.0), seed=1)
    assert (len(roles.watched), len(roles.planted)) == (0, 0)
    assert planted_share(10**6) == 0.01
    assert planted_share(1000) == 0.03


def test_half_of_the_watched_samples_judge() -> None:
    half = judges(np.arange(10_000)).mean()
    assert half == pytest.approx(0.5, abs=0.02)
    assert ALL == 2**64
