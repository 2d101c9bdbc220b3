"""find_similar: what it stores reaches exports and the review page, and nothing outdated or excluded does."""

import base64
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from review_making import shown_in
from similar_making import SimilarBench

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.features.similar import RESULTS, find_results
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage

COLUMNS = {"outlier_score", "is_outlier", "duplicate_group"}


@pytest.fixture
def bench(tmp_path: Path) -> SimilarBench:
    found = SimilarBench(tmp_path)
    found.index_some()
    found.give_features()
    return found


def test_groups_cross_classes_and_shards_and_every_row_has_neighbours(
    bench: SimilarBench, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = bench.find().facts
    entries = bench.entries()
    assert [entries[row]["duplicate_group"] for row in (3, 4, 100)] == [3, 3, 3]
    assert [entries[row]["duplicate_group"] for row in (2, 5, 101)] == [2, 2, 2]
    assert entries[6]["duplicate_group"] is None
    assert (facts.num_groups, facts.num_in_groups, facts.num_mixed_groups) == (2, 6, 1)
    assert entries[3]["neighbours"][:2] == [4, 100]
    assert all(len(entry["neighbours"]) == 12 for entry in entries.values())
    assert entries[60]["is_outlier"]
    assert max(entries.values(), key=lambda entry: entry["outlier_score"])["row"] == 60
    assert entries[7]["sample_id"] == "000007"
    assert "6 in 2 groups" in capsys.readouterr().out


def test_excluded_and_vanished_samples_are_in_no_result(bench: SimilarBench) -> None:
    bench.find()
    (bench.folder / "exclude.txt").write_text("000005\n")
    bench.index_some(101, exclude=str(bench.folder / "exclude.txt"))
    bench.publish({})
    bench.export()  # what was found before is of an older version
    assert not COLUMNS & set(bench.table()[0])
    bench.find()
    entries = bench.entries()
    assert not {5, 101} & set(entries)
    assert not {5, 101} & {row for entry in entries.values() for row in entry["neighbours"]}
    assert entries[2]["duplicate_group"] is None
    bench.export()
    by_row = {entry["row"]: entry for entry in bench.table()}
    assert 5 not in by_row
    assert by_row[101]["is_outlier"] is None  # vanished


def test_exports_have_the_columns_only_where_there_are_results(bench: SimilarBench) -> None:
    bench.publish({1: 2})
    bench.export()
    assert not COLUMNS & set(bench.table()[0])
    bench.find()
    bench.export()
    by_row = {entry["row"]: entry for entry in bench.table()}
    assert [by_row[row]["duplicate_group"] for row in (3, 4, 100, 6)] == [3, 3, 3, None]
    assert [by_row[row]["is_outlier"] for row in (60, 6)] == [True, False]
    assert by_row[60]["outlier_score"] > by_row[6]["outlier_score"] > 0
    assert {entry["row"]: entry["duplicate_group"] for entry in bench.sidecar("60")}[100] == 3
    (doubts,) = bench.out.glob("doubts/*.parquet")
    assert set(pq.read_schema(doubts).names) >= COLUMNS


def test_results_of_other_features_are_removed_with_them(
    bench: SimilarBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.find()
    store = Storage(bench.storage)
    catalogue = Catalogue.open(bench.storage)
    assert find_results(store, catalogue) is not None
    key = bench.give_features().manifest.key  # the same again
    assert find_results(store, catalogue) is not None
    bench.index_some(7)
    assert find_results(store, Catalogue.open(bench.storage)) is None
    assert "run `python -m pipelines.find_similar CONFIG` again" in capsys.readouterr().out
    bench.give_features()
    assert [name for name in store.names(store.features(key)) if "similar" in name] == []


def test_more_images_than_are_compared_exactly_need_faiss(
    bench: SimilarBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(PencilError, match="faiss is not installed"):
        bench.find(exact_rows=100)
    store = Storage(bench.storage)
    assert not any(name.endswith(RESULTS) for key in store.names("features") for name in store.names(key))


def test_without_features_the_job_says_what_to_do(tmp_path: Path) -> None:
    bench = SimilarBench(tmp_path)
    bench.index_some()
    with pytest.raises(PencilError, match=r"features.name: not set; .* has none"):
        bench.find()


def test_the_page_has_the_outliers_and_what_is_like_each_listed_sample(bench: SimilarBench) -> None:
    bench.publish({3: 1})
    (bench.folder / "exclude.txt").write_text("000004\n")
    bench.find()
    exclude = f"data.exclude={bench.folder / 'exclude.txt'}"  # newer than the catalogue and the results
    bench.report("report.listed=1", "report.audit=0", exclude)
    shown = shown_in(bench.page)
    ids = shown["samples"]["id"]
    assert ids[0] == "000003"
    assert "000060" in ids
    assert "000004" not in ids
    places = np.frombuffer(base64.b64decode(shown["similar"]["places"]["data"]), "<i4")
    like = [ids[place] for place in places[: shown["similar"]["num"]] if place >= 0]
    assert like[0] == "000100"
    assert len(like) == 11
    outliers = np.frombuffer(base64.b64decode(shown["similar"]["outlier"]["data"]), "u1")
    assert outliers[ids.index("000060")] == 1
    assert outliers[0] == 0
    bench.report("report.listed=1", "report.audit=0", "report.outliers=0", "report.similar=0")
    assert shown_in(bench.page)["samples"]["id"] == ["000003"]
