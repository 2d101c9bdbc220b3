"""Nights without training: what is new, and what is carried over, also to a new class list."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from catalogue_making import Bench, sample, samples
from label_making import pin_rows, predicted
from night_making import Nights, pins_of, started

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config, Evidence
from pencil_scale.labels.columns import FREE, PINNED
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import add_pins, read_pins
from pencil_scale.labels.published import PublishedLabels, published_url
from pencil_scale.labels.roles import choose_roles
from pencil_scale.labels.run_record import RunRecord, write_record
from pencil_scale.labels.start_labels import pin, regive, remap, set_roles, start_labels
from pencil_scale.nights.crawl import (
    Crawl,
    archive_counts,
    carry_over,
    class_mapping,
    find_crawl,
    first_classes,
    old_rows,
)
from pencil_scale.nights.record import Night
from pencil_scale.nights.start import (
    NO_ROWS,
    Prepared,
    adopt,
    clean_set,
    keep_undecided,
    night_config,
    prepare,
    remapped_head,
)
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder

SAME = [[0], [1], [2]]
NOISE = {"temperature": 1.0, "replaced": 0.3, "wrong": 0.2, "wrong_low": 0.15, "wrong_high": 0.25}


@pytest.fixture
def bench(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def found(crawl: Crawl) -> tuple[list[int], list[int]]:
    return crawl.fresh["row"].to_pylist(), crawl.regiven["row"].to_pylist()


# --- what is new -------------------------------------------------------------------------------------


def test_only_rows_that_the_catalogue_gained_are_new(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    before = bench.version()
    bench.shard("b.tar", samples(range(4, 9)))  # two of them are known
    crawl = find_crawl(before, bench.version(), SAME)
    assert found(crawl) == ([6, 7, 8], [])
    assert crawl.given_counts.tolist() == [1, 1, 1, 0]


def test_a_known_sample_starts_again_if_its_given_class_changed_or_is_its_first(bench: Nights) -> None:
    unlabelled = [member for member in sample(2) if not member[0].endswith(".cls")]
    bench.shard("a.tar", samples(range(2)) + unlabelled + samples(range(3, 6)))
    before = bench.version()
    bench.shard("a.tar", sample(0, label=2) + samples(range(1, 6)))
    crawl = find_crawl(before, bench.version(), SAME)
    assert found(crawl) == ([0, 2], [0, 2])
    assert crawl.regiven["noisy_class"].to_pylist() == [2, 2]
    assert crawl.given_counts.tolist() == [0, 0, 2, 0]


def test_a_vanished_sample_is_counted_and_keeps_its_row_until_it_returns(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(3)))
    path = bench.shard("b.tar", samples(range(3, 6)))
    before = bench.version()
    kept = path.read_bytes()
    path.unlink()
    without = bench.version()
    crawl = find_crawl(before, without, SAME)
    assert found(crawl) == ([], [])
    assert crawl.figures == {
        "new_samples": 0,
        "vanished_samples": 3,
        "returned_samples": 0,
        "regiven_samples": 0,
    }
    path.write_bytes(kept)
    back = find_crawl(without, bench.version(), SAME)
    assert found(back) == ([], [])
    assert back.figures == {
        "new_samples": 0,
        "vanished_samples": 0,
        "returned_samples": 3,
        "regiven_samples": 0,
    }


def test_samples_that_came_and_went_with_a_held_night_are_not_new_and_their_class_may_be_unknown(
    bench: Nights,
) -> None:
    bench.shard("a.tar", samples(range(3)))
    before = bench.version()
    path = bench.shard("b.tar", samples(range(3, 6)))
    (bench.folder / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    bench.shard("c.tar", sample(6, label=3))
    longer = bench.version()
    (bench.folder / "c.tar").unlink()
    path.unlink()
    (bench.folder / "classes.txt").write_text("ant\nbee\ncat\n")
    after = bench.version()
    crawl = find_crawl(before, after, SAME)
    assert (after.num_rows, crawl.figures["new_samples"]) == (7, 0)
    labels = carry_over(bench.labels(before), crawl, read_pins(bench.storage).resolve(after.class_names), "a")
    assert PublishedLabels(labels).rows(range(7)).noisy_class.tolist()[-1] == -1
    assert find_crawl(after, longer, [*SAME, []]).regiven["row"].to_pylist() == [6]


def test_a_night_with_the_first_samples_of_a_class_moves_no_labels_and_the_next_decides_them(
    bench: Nights,
) -> None:
    watching(bench)
    Folder(f"{bench.storage}/models").put("first.pt", _saved({"0.weight": torch.eye(3)}))
    (bench.folder / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    bench.shard("b.tar", samples(range(200, 230)) + sample(230, label=3) + sample(231, label=3))
    epochs = ["stages.pencil.epochs=5", "stages.finetune.epochs=2"]
    config = load_config(bench.folder / "config.yaml", [*HALF, *epochs])
    night = started(1, "first", bench.version().version)
    prepared = prepare(config, bench.nights, night)
    assert prepared is not None
    assert first_classes(prepared.crawl) == ["dog"]
    stages = night_config(config, night, prepared).stages
    assert (stages.pencil.epochs, stages.finetune.epochs) == (0, 7)
    keep_undecided(bench.nights, night, prepared)
    prepared.labels.save(published_url(bench.storage, night.name))
    labels = published_url(bench.storage, night.name)
    kept = replace(night, status="passed", labels=labels, model=prepared.weights, trained_by="first")
    bench.nights.save(replace(kept, class_names=prepared.crawl.after.class_names))
    bench.shard("c.tar", samples(range(232, 240)))
    second = prepare(config, bench.nights, started(2, night.name, bench.version().version))
    assert second is not None
    assert not second.only_learns
    assert second.undecided.tolist() == list(range(200, 232))
    watched = np.setdiff1d(np.arange(200, 240), second.rows)
    assert 5 < len(watched) < 35  # all others are trained on, as new ones are
    assert (second.rows < 200).sum() == (second.rows >= 200).sum()


def test_labels_that_match_no_class_are_counted_separately(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    before = bench.version(label="json:name")
    renamed = [(name, data.replace(b'"cat"', b'"kitten"')) for name, data in samples(range(6, 12))]
    bench.shard("b.tar", renamed)
    after = bench.version(label="json:name")
    crawl = find_crawl(before, after, SAME)
    assert crawl.given_counts.tolist() == [2, 2, 0, 2]
    assert archive_counts(crawl).tolist() == [2, 2, 2, 0]


def test_indexing_everything_again_makes_nothing_new(bench: Nights) -> None:
    renamed = [(name, data.replace(b'"cat"', b'"kitten"')) for name, data in samples(range(6))]
    bench.shard("a.tar", renamed)
    before = bench.version(label="json:name")
    after = bench.version(label="json:name", check_images="decode")
    crawl = find_crawl(before, after, SAME)
    assert after.rewritten_rows(before) == [range(6)]
    assert found(crawl) == ([], [])
    assert crawl.given_counts.tolist() == [0, 0, 0, 0]


def test_the_clean_set_differs_only_if_something_about_its_samples_has_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(6)))
    bench.shard("clean.tar", samples(range(50, 56)))
    found = []
    for taken_down in ("", "000001\n", "000001\n000050\n"):
        (tmp_path / "exclude.txt").write_text(taken_down)
        bench.index(
            shards=f"{tmp_path}/a.tar", test=f"{tmp_path}/clean.tar", exclude=f"{tmp_path}/exclude.txt"
        )
        version = Catalogue.open(bench.storage, clean_set="test").version
        found.append(clean_set(bench.storage, {"test": version}))
    assert found[0] == found[1]  # the excluded id is in the training shards
    assert found[1] != found[2]  # the excluded id is in the clean set


def test_old_rows_differ_from_night_to_night_but_not_when_a_night_is_repeated(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(60)))
    before = bench.version()
    bench.shard("b.tar", samples(range(60, 70)))
    after = bench.version()
    crawl = find_crawl(before, after, SAME)
    one, again, other = (old_rows(crawl, 20, key, NO_ROWS)["row"].to_pylist() for key in (1, 1, 2))
    assert one == again
    assert one != other
    assert len(one) == len(set(one)) == 20
    assert max(one + other) < 60
    assert old_rows(crawl, 500, 1, np.arange(50))["row"].to_pylist() == list(range(50, 60))
    assert len(old_rows(crawl, 0, 1, NO_ROWS)) == 0


# --- labels carried over -----------------------------------------------------------------------------


def test_known_labels_are_carried_over_bit_for_bit_and_new_rows_start_as_given(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    before = bench.version()
    table = bench.table(bench.labels(before))
    table.write([1, 4], np.float32([[0.1, 0.7, -3], [5, 1e-7, 2]]), None, epoch=3)
    parent = table.snapshot()
    bench.shard("b.tar", samples(range(6, 8)))
    after = bench.version()
    crawl, pins = find_crawl(before, after, SAME), read_pins(bench.storage).resolve(after.class_names)
    carried = carry_over(parent, crawl, pins, "a1b2")
    labels = bench.table(carried)
    assert labels.read(range(6)).tobytes() == table.read(range(6)).tobytes()
    assert labels.read([6, 7]).tolist() == [[10, 0, 0], [0, 10, 0]]
    assert carried.first_epoch == parent.newest_epoch + 1
    assert labels.count_visited(0) == 0


def test_a_row_with_a_new_given_class_starts_again_unless_it_is_pinned(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    manifest = pin_rows(bench.labels(bench.version()), {1: 2})
    labels = bench.table(regive(manifest, np.array([0, 1]), np.array([1, -1], np.int32)))
    assert labels.read([0, 1, 2], "noisy_class").tolist() == [1, 2, 2]
    assert labels.read([0, 1]).tolist() == [[0, 10, 0], [0, 0, 10]]
    add_pins(bench.storage, pins_of({1: "ant"}))
    again = pin(manifest, read_pins(bench.storage).resolve(("ant", "bee", "cat")))
    assert bench.table(again).read([1], "noisy_class").tolist() == [0]
    assert bench.table(again).read(range(6), "role").tolist() == [FREE, PINNED] + 4 * [FREE]


def test_new_pins_are_applied_to_the_labels_that_are_carried_over(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    catalogue = bench.version()
    parent = bench.labels(catalogue)
    add_pins(bench.storage, pins_of({3: "cat"}))
    pins = read_pins(bench.storage).resolve(catalogue.class_names)
    crawl = find_crawl(catalogue, catalogue, SAME)
    carried = carry_over(parent, crawl, pins, "a1b2")
    assert bench.table(carried).read([3]).tolist() == [[0, 0, 10]]
    untouched = carry_over(carried, crawl, pins, "c3d4")
    assert untouched.parts == carried.parts


# --- watched samples ---------------------------------------------------------------------------------

HALF = ["evidence.watched=0.5"]


def watching(bench: Nights) -> npt.NDArray[np.int64]:
    """A first run over 200 samples that watched half of them; the rows that it watched."""
    bench.shard("a.tar", samples(range(200)))
    before = bench.version()
    evidence = load_config(bench.folder / "config.yaml", HALF).evidence
    roles = choose_roles(before, None, NO_ROWS, evidence, seed=1)
    table = bench.table(start_labels(before, bench.storage, 10.0, watched=roles.watched))
    trained = np.setdiff1d(np.arange(200), roles.watched)
    table.mark(np.arange(200), predicted(np.arange(200), 3), epoch=0)
    assert np.flatnonzero(table.read(range(200), "last_epoch")).tolist() == trained.tolist()
    labels = replace(table.snapshot(), noise={**NOISE, "watched_below": float(roles.threshold)})
    labels.save(published_url(bench.storage, "first"))
    bench.nights.save(first_night(bench, before))
    return roles.watched


def prepared_night(bench: Nights, version: int, number: int = 1) -> Prepared:
    config = load_config(bench.folder / "config.yaml", HALF)
    prepared = prepare(config, bench.nights, started(number, "first", version))
    assert prepared is not None
    return prepared


def test_a_night_trains_on_no_sample_that_is_watched_and_watches_its_share_of_the_new_ones(
    bench: Nights,
) -> None:
    watched = watching(bench)
    bench.shard("b.tar", samples(range(200, 240)))
    after = bench.version()
    night = prepared_night(bench, after.version)
    tonight = choose_roles(after, night.rows, NO_ROWS, Evidence(watched=0.5), seed=1, parent=night.labels)
    assert tonight.watched[tonight.watched < 200].tolist() == watched.tolist()
    new = tonight.watched[tonight.watched >= 200]
    assert 10 < len(new) < 30
    assert not np.isin(night.rows, tonight.watched).any()
    assert sorted([*night.rows[night.rows >= 200], *new]) == list(range(200, 240))
    assert (night.rows < 200).sum() == (night.rows >= 200).sum()  # nightly.old_per_new is 1


def test_a_night_whose_only_new_sample_is_watched_has_nothing_to_train_on(bench: Nights) -> None:
    watching(bench)
    for number in range(200, 230):
        bench.shard("b.tar", samples([number]))
        night = prepared_night(bench, bench.version().version, number)
        if not len(night.rows):
            break
        (bench.folder / "b.tar").unlink()
    assert (len(night.crawl.fresh), len(night.rows)) == (1, 0)


def test_a_watched_sample_that_was_taken_down_is_watched_no_more(bench: Nights) -> None:
    watched = watching(bench)
    gone = bench.folder / "gone.txt"
    gone.write_text(f"{watched[0]:06d}\n")
    bench.shard("b.tar", samples(range(200, 240)))
    after = bench.version(exclude=str(gone))
    night = prepared_night(bench, after.version)
    tonight = choose_roles(after, night.rows, NO_ROWS, Evidence(watched=0.5), seed=1, parent=night.labels)
    assert tonight.watched[tonight.watched < 200].tolist() == watched[1:].tolist()
    labels = set_roles(night.labels, None, tonight.watched)
    assert PublishedLabels(labels).rows(range(200)).role[watched[0]] == FREE
    assert watched[0] not in night.rows
    newer = replace(labels, noise={**NOISE, "replaced": 0.0, "since": labels.first_epoch})
    newer = replace(newer, earlier_noise=(labels.noise or {},))
    parts = PublishedLabels(night.labels).rows(range(200)), PublishedLabels(newer).rows(range(200))
    was, now = (part.decide().corrected_class for part in parts)
    assert (was != now)[watched[1:]].any()  # the newer noise model decides those that are still watched
    assert was[watched[0]] == now[watched[0]]


def test_a_night_without_evidence_trains_on_what_was_watched_and_keeps_the_noise(bench: Nights) -> None:
    watching(bench)
    bench.shard("b.tar", samples(range(200, 400)))
    version = bench.version().version
    config = load_config(bench.folder / "config.yaml", ["evidence.watched=0"])
    night = prepare(config, bench.nights, started(1, "first", version))
    assert night is not None
    assert night.rows.tolist() == list(range(400))
    assert night.labels.noise is not None


def test_labels_keep_their_noise_under_a_new_class_list(bench: Nights) -> None:
    watching(bench)
    parent = Manifest.load(published_url(bench.storage, "first"))
    parent = replace(parent, earlier_noise=({**NOISE, "since": 0},), noise={**parent.noise, "since": 1})
    changed, _ = remap(parent, [[2], [0], [1]], ("cat", "ant", "bee"))
    assert (changed.noise, changed.earlier_noise) == (parent.noise, parent.earlier_noise)
    before, after = (PublishedLabels(labels).rows(range(200)).decide() for labels in (parent, changed))
    assert (np.array([1, 2, 0])[before.corrected_class] == after.corrected_class).all()
    assert before.num_changed > 20


# --- a new class list --------------------------------------------------------------------------------


def test_classes_are_matched_by_name_and_a_removed_one_must_be_accounted_for() -> None:
    assert class_mapping(["ant", "bee", "cat"], ["cat", "ant", "bee"], {}) == [[2], [0], [1]]
    assert class_mapping(["ant", "bee"], ["ant", "bee", "new"], {}) == [[0], [1], []]
    assert class_mapping(["ant", "bee", "cat"], ["ant", "bee"], {"cat": "bee"}) == [[0], [1, 2]]
    assert class_mapping(["ant", "bee", "cat"], ["ant", "bee"], {"cat": None}) == [[0], [1]]
    assert class_mapping(["ant", "bee"], ["ant", "bee"], {"bee": "ant"}) == [[0], [1]]  # still listed
    with pytest.raises(PencilError, match=r"'cat' left the class list .* nightly.remap=\{cat: ant\}"):
        class_mapping(["ant", "cat"], ["ant", "kat"], {})
    with pytest.raises(PencilError, match=r"'cat' became 'kat', which data.classes does not name"):
        class_mapping(["ant", "cat"], ["ant", "bee"], {"cat": "kat"})


def test_labels_pins_and_network_follow_a_declared_change_of_classes(bench: Nights) -> None:
    bench.shard("a.tar", samples(range(6)))
    before = bench.version(label="json:name")
    add_pins(bench.storage, pins_of({0: "cat"}))
    labels = published_url(bench.storage, "first")
    bench.labels(before).save(labels)
    weights = {"0.weight": torch.ones(2, 2), "1.weight": torch.eye(3), "1.bias": torch.tensor([1.0, 2, 3])}
    Folder(f"{bench.storage}/models").put("first.pt", _saved(weights))
    bench.nights.save(first_night(bench, before))
    (bench.folder / "classes.txt").write_text("cat\nant\ndog\n")  # bee became ant, dog is new
    after = bench.version(label="json:name", aliases=_aliases(bench))
    night = started(1, "first", after.version)
    config = load_config(bench.folder / "config.yaml", ["nightly.remap={bee: ant}"])
    for _ in range(2):  # the second time as after a kill
        prepared = prepare(config, bench.nights, night)
        assert prepared is not None
        assert prepared.crawl.mapping == [[2], [0, 1], []]
        assert found(prepared.crawl) == ([], [])  # only the numbers of the classes have changed
        table = bench.table(prepared.labels)
        assert table.read(range(6), "noisy_class").tolist() == [0, 1, 0, 1, 1, 0]  # row 0 is pinned to cat
        assert read_pins(bench.storage).table["class"].to_pylist() == ["cat"]
        head = torch.load(_file(prepared.weights), weights_only=True)
        assert head["1.bias"].tolist() == [3.0, 1.5, 0.0]
        assert head["0.weight"].tolist() == weights["0.weight"].tolist()


def first_night(bench: Nights, catalogue: Catalogue) -> Night:
    """A finished run that the first night continues."""
    return Night(
        "first",
        0,
        None,
        catalogue.version,
        status="passed",
        class_names=catalogue.class_names,
        labels=published_url(bench.storage, "first"),
        model=f"{bench.storage}/models/first.pt",
        trained_by="first",
    )


def reordered_after_night(bench: Nights, names: str, remap: str) -> tuple[Night, Catalogue, Config]:
    """Make a first night over ant, bee and cat, then index again with other class names."""
    bench.shard("a.tar", samples(range(6)))
    before = bench.version(label="json:name")
    pins = read_pins(bench.storage).resolve(before.class_names)
    start_labels(before, bench.storage, 10.0, pins).save(published_url(bench.storage, "first"))
    weights = {"1.weight": torch.eye(3), "1.bias": torch.tensor([1.0, 2, 3])}
    Folder(f"{bench.storage}/models").put("first.pt", _saved(weights))
    night = first_night(bench, before)
    bench.nights.save(night)
    (bench.folder / "classes.txt").write_text(names)
    after = bench.version(label="json:name")
    return night, after, load_config(bench.folder / "config.yaml", [f"nightly.remap={remap}"])


def test_a_pin_keeps_its_class_when_nights_with_a_new_class_list_are_held(bench: Nights) -> None:
    _, after, config = reordered_after_night(bench, "cat\nant\nbee\n", "{}")
    add_pins(bench.storage, pins_of({0: "cat"}))
    for number in (1, 2, 3):  # each is held, so the next one starts from the first night again
        night = started(number, "first", after.version)
        prepared = prepare(config, bench.nights, night)
        assert prepared is not None
        assert prepared.labels.class_names == ("cat", "ant", "bee")
        assert bench.table(prepared.labels).read([0, 1], "noisy_class").tolist() == [0, 2]


def test_a_sample_pinned_to_a_dropped_class_gets_its_given_class_back(
    bench: Nights, capsys: pytest.CaptureFixture[str]
) -> None:
    add_pins(bench.storage, pins_of({0: "cat", 1: "ant"}))  # given ant and bee
    _, after, config = reordered_after_night(bench, "bee\nant\n", "{cat: null}")
    prepared = prepare(config, bench.nights, started(1, "first", after.version))
    assert prepared is not None
    table = bench.table(prepared.labels)
    # Cats no longer have a usable label.
    assert table.read(range(6), "noisy_class").tolist() == [1, 1, -1, 1, 0, -1]
    assert table.read(range(6), "role").tolist() == [FREE, PINNED] + 4 * [FREE]
    assert table.read([0]).tolist() == [[0, 10]]
    ok = after.read(0, 6, ["status"])["status"].to_pylist()
    assert [status == "ok" for status in ok] == [True, True, False, True, True, False]
    assert "1 pin without effect" in capsys.readouterr().out


def test_labels_follow_a_class_that_is_renamed_in_place(bench: Nights) -> None:
    _, after, config = reordered_after_night(bench, "ant\nbee\nfeline\n", "{cat: feline}")
    prepared = prepare(config, bench.nights, started(1, "first", after.version))
    assert prepared is not None
    assert not prepared.same_classes
    assert prepared.labels.class_names == ("ant", "bee", "feline")


def test_a_void_pin_frees_the_row_that_an_older_pin_had_fixed(bench: Nights) -> None:
    add_pins(bench.storage, pins_of({1: "cat"}))
    _, after, config = reordered_after_night(bench, "ant\nbee\ncat\n", "{}")
    add_pins(bench.storage, pins_of({1: "dog"}))  # a class that is not in the list
    prepared = prepare(config, bench.nights, started(1, "first", after.version))
    assert prepared is not None
    table = bench.table(prepared.labels)
    assert (table.read([1], "noisy_class").tolist(), table.read([1], "role").tolist()) == ([1], [FREE])


def test_a_pin_follows_any_number_of_renames(bench: Nights) -> None:
    add_pins(bench.storage, pins_of({0: "cat", 1: "dog", 2: "owl"}))
    moved = {"cat": "feline", "feline": "predator", "owl": None, "dog": "wolf", "wolf": "dog"}
    pins = read_pins(bench.storage).resolve(("ant", "predator"), moved)
    assert (pins.rows.tolist(), pins.classes.tolist()) == ([0], [1])
    assert pins.void["row"].to_pylist() == [1, 2]


def test_a_pin_follows_a_class_that_was_renamed(bench: Nights) -> None:
    add_pins(bench.storage, pins_of({0: "cat"}))
    _, after, config = reordered_after_night(bench, "feline\nant\nbee\n", "{cat: feline}")
    prepared = prepare(config, bench.nights, started(1, "first", after.version))
    assert prepared is not None
    assert bench.table(prepared.labels).read([0], "noisy_class").tolist() == [0]
    assert bench.table(prepared.labels).read([0], "role").tolist() == [PINNED]


def test_nights_do_not_start_from_a_held_run(bench: Nights) -> None:
    write_record(
        bench.storage,
        RunRecord("bad", "a1b2", {}, 1, (), {}, "", status="held", held_because=("cat vanished",)),
    )
    assert adopt(bench.nights, None) is None
    with pytest.raises(PencilError, match=r"start_from: bad is held: cat vanished.*promote CONFIG bad"):
        adopt(bench.nights, "bad")


def test_a_merged_class_of_a_network_is_the_mean_of_the_old_ones_and_a_new_one_is_zero() -> None:
    head = {"w": torch.ones(4), "fc.weight": torch.tensor([[1.0], [3.0]]), "fc.bias": torch.tensor([0.0, 2])}
    moved = remapped_head(head, [[], [0, 1]], 2)
    assert moved["fc.weight"].tolist() == [[0.0], [2.0]]
    assert moved["fc.bias"].tolist() == [0.0, 1.0]
    assert moved["w"].tolist() == [1.0] * 4


def _saved(weights: dict[str, torch.Tensor]) -> bytes:
    sink = io.BytesIO()
    torch.save(weights, sink)
    return sink.getvalue()


def _file(url: str) -> Any:
    folder, _, name = url.rpartition("/")
    return io.BytesIO(Folder(folder).get(name))


def _aliases(bench: Nights) -> str:
    path = bench.folder / "aliases.txt"
    path.write_text("bee\tant\n")
    return str(path)
