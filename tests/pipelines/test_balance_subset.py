"""Subsets: balanced, seeded, stable when samples are added, and usable for training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from catalogue_making import CLASSES, Bench, sample, samples
from label_making import new_table

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.published import published_url
from pencil_scale.storage.errors import PencilError
from pencil_scale.subset.choice import Rule, candidates, merge_picks, position_limits
from pencil_scale.subset.files import read_members
from pencil_scale.train.plan import make_plan
from pipelines.balance_subset import Summary, main, run

NO_LIMITS = np.full(3, 2**64 - 1, np.uint64)


class SubsetBench(Bench):
    """A catalogue to draw subsets from."""

    def config(self, *overrides: str) -> Config:
        return load_config(self.folder / "config.yaml", overrides)

    def draw(self, *overrides: str) -> Summary:
        return run(self.config(*overrides))

    def members(self, summary: Summary) -> list[int]:
        rows = read_members(summary.folder, Catalogue.open(self.storage))
        return rows.tolist()

    def publish(self, corrected: Sequence[int], sure: Sequence[float], name: str = "t") -> None:
        """Publish labels with these classes, which have these shares of the labels."""
        catalogue = Catalogue.open(self.storage)
        given = np.array([row["noisy_class"] for row in catalogue.read(0, catalogue.num_rows).to_pylist()])
        store = f"{self.storage}/labels"
        table = new_table(self.folder / f"table-{name}", given, catalogue.class_names, store)
        shares = np.full((len(given), len(CLASSES)), 1e-6)
        shares[np.arange(len(given)), corrected] = sure
        shares += (1 - shares.sum(1, keepdims=True)) / len(CLASSES)
        table.write(np.arange(len(given)), np.log(shares), None, epoch=0)
        table.snapshot().save(published_url(self.storage, name))


@pytest.fixture
def bench(tmp_path: Path) -> SubsetBench:
    found = SubsetBench(tmp_path)
    found.shard("a.tar", samples(range(30)))  # classes 0, 1, 2 in turn
    found.shard("b.tar", samples(range(30, 60)))
    found.index()
    return found


def test_all_classes_have_equally_many_members(bench: SubsetBench) -> None:
    summary = bench.draw("subset.per_class=5")
    rows = bench.members(summary)
    assert np.bincount(np.array(rows) % 3).tolist() == [5, 5, 5]
    assert summary.words.class_counts == (5, 5, 5)
    assert sum(bench.draw("subset.total=20").words.class_counts) == 20


def test_the_members_depend_on_the_seed(bench: SubsetBench) -> None:
    first = bench.members(bench.draw("subset.per_class=6", "subset.name=x"))
    assert bench.members(bench.draw("subset.per_class=6", "subset.name=y")) == first
    assert bench.members(bench.draw("subset.per_class=6", "subset.name=z", "run.seed=2")) != first


def test_a_second_run_draws_nothing_if_nothing_changed(bench: SubsetBench) -> None:
    first = bench.draw("subset.per_class=6")
    assert first.drawn
    again = bench.draw("subset.per_class=6")
    assert not again.drawn
    assert again.words == first.words
    assert bench.draw("subset.per_class=7").drawn


def test_when_the_catalogue_grows_new_members_replace_equally_many_old_ones(bench: SubsetBench) -> None:
    before = set(bench.members(bench.draw("subset.per_class=10")))
    bench.shard("c.tar", samples(range(60, 75)))
    bench.index()
    after = set(bench.members(bench.draw("subset.per_class=10")))
    newcomers = {row for row in after if row >= 60}
    assert newcomers
    assert len(before - after) == len(newcomers)


def test_a_class_with_too_few_samples_is_named_or_used_completely(bench: SubsetBench) -> None:
    bench.shard("c.tar", [member for number in (60, 61, 62) for member in sample(number, label=0)])
    bench.index()
    with pytest.raises(PencilError, match=r"class 1 \(bee\) has 20 of 23, class 2 \(cat\) has 20 of 23"):
        bench.draw("subset.per_class=23")
    taken = bench.draw("subset.per_class=23", "subset.on_shortage=take_all")
    assert taken.words.class_counts == (23, 20, 20)


def test_the_allocation_is_printed_before_the_subset(
    bench: SubsetBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.draw("subset.total=30")
    said = capsys.readouterr().out
    assert 0 <= said.index("allocation: 30 samples") < said.index("data.subset=")


def test_excluded_ids_and_rows_that_are_not_ok_are_never_drawn(bench: SubsetBench) -> None:
    bench.shard("c.tar", [("000060.png", b"broken"), ("000060.cls", b"0")])
    bench.index()
    (bench.folder / "out.txt").write_text("000000\n000003\n")
    drawn = bench.draw(
        "subset.per_class=20", "subset.on_shortage=take_all", f"subset.exclude={bench.folder}/out.txt"
    )
    assert drawn.words.class_counts == (18, 20, 20)
    assert not {0, 3, 60} & set(bench.members(drawn))


def test_a_subset_can_be_balanced_by_corrected_class_and_confidence(bench: SubsetBench) -> None:
    corrected = np.where(np.arange(60) < 30, 0, np.arange(60) % 3)  # all of the first shard is class 0
    bench.publish(corrected, [0.95] * 50 + [0.5] * 10)
    drawn = bench.draw("subset.per_class=30", "subset.by=corrected", "subset.on_shortage=take_all")
    assert drawn.words.class_counts == (30, 10, 10)
    sure = ["subset.by=corrected", "subset.min_confidence=0.9", "subset.on_shortage=take_all"]
    assert drawn.available.tolist() == [40, 10, 10]
    drawn = bench.draw("subset.per_class=60", *sure)
    assert drawn.words.class_counts == (37, 7, 6)
    # By given class, the share of the given class counts: a third of the first shard still has it.
    drawn = bench.draw("subset.per_class=60", "subset.min_confidence=0.9", "subset.on_shortage=take_all")
    assert drawn.words.class_counts == (17, 7, 6)


def test_an_error_about_unpublished_labels_lists_the_published_ones(bench: SubsetBench) -> None:
    with pytest.raises(PencilError, match="no published labels; train first"):
        bench.draw("subset.per_class=3", "subset.by=corrected")
    bench.publish([0] * 60, [0.9] * 60, name="night-1")
    with pytest.raises(PencilError, match="published are night-1"):
        bench.draw("subset.per_class=3", "subset.by=corrected")
    assert bench.draw(
        "subset.per_class=3", "subset.by=corrected", "subset.labels=night-1", "subset.on_shortage=take_all"
    )


def test_limits_on_positions_change_no_pick_and_spare_most_samples(bench: SubsetBench) -> None:
    rng = np.random.default_rng(0)
    bench.shard("big.tar", [m for n in range(60, 1500) for m in sample(n, label=int(rng.integers(3)))])
    catalogue = bench.index().catalogue
    rule = Rule(catalogue, seed=7)
    quotas, counts = np.array([3, 3, 3]), np.array(catalogue.manifest["class_counts"])
    rows, limits = range(0, catalogue.num_rows), position_limits(quotas, counts)
    limited = candidates(rule, rows, quotas, limits)
    assert limited.equals(candidates(rule, rows, quotas, NO_LIMITS))
    assert (limits.astype(float) / 2**64 < 0.2).all()
    halves = [candidates(rule, half, quotas, limits) for half in (range(0, 700), range(700, len(rows)))]
    assert merge_picks(halves[::-1], quotas, 7).equals(limited)


def test_webdataset_reads_the_shards_that_members_are_copied_into(bench: SubsetBench) -> None:
    summary = bench.draw("subset.per_class=4", "subset.shards=always", "subset.samples_per_shard=5")
    assert summary.num_shards_written == 3
    found = list(_webdataset_of(bench, summary))
    assert sorted(each["__key__"] for each in found) == [f"{row:06d}" for row in bench.members(summary)]
    for each in found:
        members = {name.rpartition(".")[2]: data for name, data in sample(int(each["__key__"]))}
        assert {suffix: each[suffix] for suffix in members} == members
    again = bench.draw("subset.per_class=4", "subset.shards=always", "subset.samples_per_shard=5")
    assert (again.num_shards_written, again.words.shards) == (0, summary.words.shards)


def test_samples_are_copied_completely_whichever_member_comes_first(tmp_path: Path) -> None:
    bench = SubsetBench(tmp_path)
    for name in ("a", "b"):  # the same keys in both shards
        members = [sample(number + 30 * (name == "b"), key=f"k{number}") for number in range(30)]
        turned = [
            member
            for each, turn in zip(members, [0, 1, 2] * 10, strict=True)
            for member in each[turn:] + each[:turn]
        ]
        bench.shard(f"{name}.tar", turned)
    bench.index(identity="shard_key")
    summary = bench.draw("subset.per_class=3", "subset.shards=always")
    for found in _webdataset_of(bench, summary):
        shard, _, key = found["__key__"].partition("/")
        members = dict(sample(int(key[1:]) + 30 * (shard == "b"), key=key))
        assert {f"{key}.{suffix}": found[suffix] for suffix in ("png", "cls", "json")} == members


def test_thinly_spread_members_are_copied_into_new_shards_by_default(bench: SubsetBench) -> None:
    assert bench.draw("subset.per_class=1", "subset.thin_share=0.5").words.shards is not None
    assert bench.draw("subset.per_class=9", "subset.thin_share=0.01").words.shards is None


def test_members_are_not_copied_from_a_shard_that_changed_since_it_was_indexed(bench: SubsetBench) -> None:
    bench.shard("b.tar", samples(range(30, 61)))
    with pytest.raises(PencilError, match="changed since it was indexed"):
        bench.draw("subset.per_class=15", "subset.shards=always")


def test_training_accepts_the_subset_and_refuses_one_of_another_storage(
    bench: SubsetBench, tmp_path: Path
) -> None:
    summary = bench.draw("subset.per_class=5")
    plan = make_plan(bench.config(f"data.subset={summary.folder}", "images.crop=4"))
    assert plan.stream.subset is not None
    assert plan.stream.subset.tolist() == bench.members(summary)
    assert "15 samples" in plan.lines[0]
    other = SubsetBench(_made(tmp_path / "other"))
    other.shard("a.tar", samples(range(9)))
    other.index()
    with pytest.raises(PencilError, match="was drawn from memory://"):
        make_plan(other.config(f"data.subset={summary.folder}"))
    with pytest.raises(PencilError, match="has no subset"):
        make_plan(other.config("data.subset=memory://nowhere"))


def test_a_subset_of_a_newer_catalogue_is_refused(bench: SubsetBench) -> None:
    bench.shard("c.tar", samples(range(60, 66)))
    bench.index()
    summary = bench.draw("subset.per_class=5")
    with pytest.raises(PencilError, match="catalogue version 2, this run has version 1"):
        read_members(summary.folder, Catalogue.open(bench.storage, version=1))


def test_setting_neither_per_class_nor_total_ends_with_one_line(
    bench: SubsetBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bench.folder / "config.yaml")]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: subset.per_class, subset.total: set exactly one")
    )


@pytest.mark.ray
def test_a_cluster_draws_the_same_members_as_one_process(tmp_path: Path, ray_session: None) -> None:
    import pencil_scale.subset.choice as module

    bench = SubsetBench(tmp_path)
    bench.shard("a.tar", samples(range(60)))
    bench.storage = str(tmp_path / "lake")
    bench.index()
    catalogue = Catalogue.open(bench.storage)
    here = candidates(Rule(catalogue, 1), range(0, 60), np.array([5, 5, 5]), NO_LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RANGE_ROWS", 16)
        drawn = bench.draw("subset.per_class=5", "subset.shards=always", "subset.samples_per_shard=5")
    assert bench.members(drawn) == here["row"].to_pylist()
    assert len(list(_webdataset_of(bench, drawn))) == 15


def _webdataset_of(bench: SubsetBench, summary: Summary) -> Any:
    """Copy the new shards to disk and read them with webdataset's loader."""
    import fsspec

    files = fsspec.open_files(f"{summary.words.shards}/*.tar", "rb")
    urls = []
    for number, file in enumerate(files):
        with file as opened:
            path = bench.folder / f"copy-{number}.wds"
            path.write_bytes(opened.read())
            urls.append(str(path))
    return webdataset.WebDataset(urls, shardshuffle=False)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
