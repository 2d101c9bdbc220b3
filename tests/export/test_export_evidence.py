"""Labels that are decided by predictions are exported, drawn and told with their probabilities."""

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from catalogue_making import samples
from export_making import ExportBench
from label_making import new_labels, packed, pin_rows
from night_making import pins_of

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import add_pins
from pencil_scale.labels.published import published_url
from pencil_scale.labels.start_labels import set_roles
from pencil_scale.labels.table import LabelTable
from pencil_scale.review.story import tell
from pencil_scale.storage.storage import Storage
from pencil_scale.subset.choice import Rule, count

NOISE = {"temperature": 1.0, "replaced": 0.3, "wrong": 0.2, "wrong_low": 0.15, "wrong_high": 0.25}
SURE, UNSURE = [0.02, 0.03, 0.95], [0.2, 0.1, 0.7]


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    """Eight samples of ant, bee, cat in turn: 3 is pinned, 4 watched, 6 and 7 are never predicted."""
    found = ExportBench(tmp_path)
    found.shard("a.tar", samples(range(8)))
    found.index()
    catalogue = Catalogue.open(found.storage)
    given = catalogue.read(0, 8)["noisy_class"].to_numpy()
    labels = pin_rows(new_labels(f"{found.storage}/labels", given, catalogue.class_names), {3: 1})
    labels = replace(set_roles(labels, None, np.array([4, 7])), catalogue=catalogue.id)
    table = LabelTable.restore(labels, tmp_path / "table")
    shares = [UNSURE, SURE, UNSURE, SURE, SURE, SURE]  # the network says cat, for all of them
    table.mark(np.arange(6), packed(np.log(shares)), epoch=0)
    table.mark([6], None, epoch=0)
    replace(table.snapshot(), noise=NOISE).save(published_url(found.storage, "t"))
    return found


def test_predictions_decide_every_label_but_those_of_people(bench: ExportBench) -> None:
    bench.export()
    found = [(row["predicted_class"], row["predicted_by"], row["is_label_issue"]) for row in bench.table()]
    assert found == [
        ("ant", "labels", False),
        ("cat", "labels", True),
        ("cat", "labels", False),
        ("bee", "person", True),
        ("cat", "watched", True),
        ("cat", "labels", False),
        ("ant", "given", False),
        ("bee", "given", False),
    ]


def test_the_learned_label_of_what_was_trained_on_is_exported_beside_the_decision(bench: ExportBench) -> None:
    bench.export()
    found = [(row["learned_label"], row["predicted_label"]) for row in bench.table()[:5]]
    assert found[1] == (1, 2)  # it has not moved, and the prediction decides
    assert found[4] == (None, 2)  # watched


def test_scores_are_the_probability_that_a_label_is_right(bench: ExportBench) -> None:
    bench.export()
    changed, kept = bench.table()[4], bench.table()[0]
    total = 0.03 * 0.8 + 0.97 * 0.1
    assert changed["label_score"] == pytest.approx(0.03 * 0.8 / total, abs=1e-3)
    assert changed["confidence"] == pytest.approx(0.95 * 0.1 / total, abs=1e-3)
    assert changed["margin"] == pytest.approx((0.095 - 0.024) / total, abs=2e-3)
    assert kept["confidence"] == kept["label_score"] == pytest.approx(0.16 / 0.24, abs=1e-3)


def test_a_label_that_is_kept_though_another_class_is_ahead_has_a_margin_of_0(bench: ExportBench) -> None:
    url = published_url(bench.storage, "t")
    replace(Manifest.load(url), noise=NOISE | {"min_log_odds": 3.0}).save(url)
    bench.export()
    kept = bench.table()[4]
    assert (kept["is_label_issue"], kept["margin"]) == (False, 0.0)
    assert kept["label_score"] == kept["confidence"] < 0.5


def test_duckdb_reads_every_file_of_an_export(bench: ExportBench) -> None:
    bench.export()
    for files in ("table/*.parquet", "doubts/*.parquet", "sidecars/*/*.parquet"):
        rows = duckdb.sql(f"select * from '{bench.out}/{files}' order by row").fetchall()
        assert len(rows) == (5 if files.startswith("doubts") else 8)
        shares = duckdb.sql(f"select label_score, confidence, margin, top_shares from '{bench.out}/{files}'")
        assert list(map(str, shares.types)) == ["FLOAT", "FLOAT", "FLOAT", "FLOAT[]"]


def test_the_top_classes_are_those_of_the_prediction(bench: ExportBench) -> None:
    bench.export("export.top_k=2")
    exported = bench.table()
    assert exported[4]["top_labels"] == [2, 1]
    assert exported[4]["top_shares"] == pytest.approx([0.95, 0.03], abs=1e-3)
    assert exported[0]["top_labels"] == [2, 0]  # the label stays, though another class is more likely
    assert exported[6]["top_labels"] is None


def test_a_pin_made_since_wins_over_the_prediction(bench: ExportBench) -> None:
    add_pins(bench.storage, pins_of({1: "bee"}))
    bench.export()
    pinned = bench.table()[1]
    assert (pinned["predicted_class"], pinned["predicted_by"]) == ("bee", "person")
    assert pinned["confidence"] > 0.99


def test_a_subset_of_corrected_classes_follows_the_predictions(bench: ExportBench) -> None:
    labels = Manifest.load(published_url(bench.storage, "t"))
    rule = Rule(Catalogue.open(bench.storage), 1, labels, corrected=True)
    assert count(rule, range(8)).tolist() == [2, 2, 4]


def test_a_label_that_no_night_has_decided_is_as_given_and_has_no_score(bench: ExportBench) -> None:
    bench.export()
    undecided = bench.table()[6]
    assert (undecided["label_score"], undecided["confidence"]) == (None, None)
    told = "\n".join(tell(Storage(bench.storage), "000006", None, []))
    assert "ant, as given: no night has decided it yet" in told


def test_the_story_of_a_watched_sample_says_that_it_was_not_trained_on(bench: ExportBench) -> None:
    trained, watched = (
        "\n".join(tell(Storage(bench.storage), name, None, [])) for name in ("000001", "000004")
    )
    assert "cat, right with a probability of 0.79\n" in trained
    assert "0.79: watched, predicted by a network that was never trained on it" in watched
