"""The review page shows how good the network is and the most doubtful labels, and nothing excluded."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue_making import image, samples
from mlflow import MlflowClient
from PIL import Image
from review_making import ReviewBench, shown_in

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.published import find_published
from pencil_scale.labels.report import read_traces
from pencil_scale.labels.run_record import ways_on
from pencil_scale.review.audit import CHANGED, UNCHANGED
from pencil_scale.review.network import network_facts, network_notes
from pencil_scale.review.page import as_json, content_policy
from pencil_scale.review.scan import by_transition, pick
from pencil_scale.review.thumbnails import make_thumbnails
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.tracking.tracker import copy_page
from pipelines.review_report import main


@pytest.fixture
def bench(tmp_path: Path) -> ReviewBench:
    found = ReviewBench(tmp_path)
    found.shard("00041.tar", samples(range(6)))  # classes 0, 1, 2 in turn
    found.shard("00042.tar", samples(range(6, 12)))
    found.index()
    found.publish({1: 2, 7: 0})
    return found


def numbers(column: dict[str, str]) -> list[int]:
    return np.frombuffer(base64.b64decode(column["data"]), f"<{column['kind']}").tolist()


def cells(found: dict[str, Any]) -> dict[tuple[int, int], int]:
    first, second, num = (numbers(found[name]) for name in ("first", "second", "num"))
    return {(a, b): n for a, b, n in zip(first, second, num, strict=True)}


# --- what is counted and shown -----------------------------------------------------------------------


def test_the_page_shows_every_change_with_its_classes_and_shares(bench: ReviewBench) -> None:
    summary = bench.report()
    assert (summary.page, summary.num_listed, summary.num_drawn) == (str(bench.page), 12, 12)
    shown = bench.shown()
    assert shown["classes"] == ["ant", "bee", "cat"]
    assert shown["counts"]["labels"] == 12
    assert shown["counts"]["changed"] == 2
    assert cells(shown["transitions"]) == {(0, 0): 4, (1, 1): 2, (2, 2): 4, (1, 2): 1, (1, 0): 1}
    listed = shown["samples"]
    changed = [
        id for id, score in zip(listed["id"], numbers(listed["label_score"]), strict=True) if score < 30_000
    ]
    assert sorted(changed) == ["000001", "000007"]
    index = listed["id"].index("000001")
    assert numbers(listed["given_label"])[index] == 1
    assert numbers(listed["predicted_label"])[index] == 2
    assert numbers(listed["confidence"])[index] / 65535 == pytest.approx(0.8, abs=1e-4)
    assert numbers(listed["label_score"])[index] / 65535 == pytest.approx(0.1, abs=1e-4)
    assert numbers(listed["top_labels"])[3 * index : 3 * index + 3] == [2, 0, 1]
    assert sum(map(sum, shown["scores"])) == 12
    assert all(picture.startswith("data:image/png;base64,") for picture in shown["thumbnails"])


def test_the_audit_draws_every_change_if_there_are_few_and_each_sample_once(
    bench: ReviewBench,
) -> None:
    bench.report("report.audit=5")
    shown = bench.shown()
    audit, ids = shown["audit"], shown["samples"]["id"]
    assert (audit[CHANGED], audit[UNCHANGED]) == (2, 10)
    assert sorted(audit["stratum"]) == [CHANGED] * 2 + [UNCHANGED] * 5
    assert len(set(ids)) == len(ids) == 12
    drawn = {
        ids[index] for index, kind in zip(audit["order"], audit["stratum"], strict=True) if kind == CHANGED
    }
    assert drawn == {"000001", "000007"}


def test_untrained_labels_are_counted_separately_and_never_drawn(bench: ReviewBench) -> None:
    bench.publish({1: 2}, visited=[0, 1, 2])
    summary = bench.report()
    assert (summary.counts["labels"], summary.counts["untouched"], summary.num_drawn) == (3, 9, 3)
    assert "Undecided: 9 usable samples" in bench.page.read_text()


def test_pinned_labels_are_counted_but_not_shown_for_review(bench: ReviewBench) -> None:
    from pipelines import pin_labels

    (bench.folder / "d.csv").write_text("sample_id,class\n000001,ant\n")
    pin_labels.run(load_config(bench.config, [f"pin.file={bench.folder}/d.csv", "pin.by=ada"]))
    summary = bench.report()
    assert (summary.counts["pinned"], summary.counts["changed"], summary.num_listed) == (1, 2, 11)
    assert "000001" not in bench.shown()["samples"]["id"]


def test_a_label_is_followed_through_the_epochs(bench: ReviewBench) -> None:
    given = [row % 3 for row in range(12)]
    bench.keep_history({4: given, 6: [*given[:1], 0, *given[2:]], 9: [*given[:1], 2, *given[2:]]})
    bench.report()
    shown = bench.shown()
    index = shown["samples"]["id"].index("000001")
    assert shown["traces"]["epochs"] == [4, 6, 9]
    assert numbers(shown["traces"]["classes"])[3 * index : 3 * index + 3] == [1, 0, 2]
    assert numbers(shown["samples"]["last_change_epoch"])[index] == 9
    some = read_traces(find_published(bench.storage, "t"), np.array([1, 7]), most=2)
    assert (some.epochs, some.classes.tolist()) == ((4, 9), [[1, 2], [1, 1]])


def test_a_history_file_that_was_cut_short_is_named(bench: ReviewBench) -> None:
    import fsspec

    with fsspec.open(f"{bench.storage}/labels/history/t/epoch-00003.arrow", "wb", auto_mkdir=True) as file:
        file.write(b"ARROW1\0\0 and no more")
    with pytest.raises(DamagedError, match=r"epoch-00003.arrow: damaged history file .*; remove it"):
        bench.report()


def test_the_page_shows_what_changed_since_another_night(bench: ReviewBench) -> None:
    bench.publish({1: 2, 4: 0}, name="before")
    bench.shard("00043.tar", samples(range(12, 15)))
    bench.index()
    bench.publish({1: 2, 7: 0})
    summary = bench.report("report.since=before")
    counts = {name: summary.counts[name] for name in ("moved", "flagged", "cleared", "new")}
    assert counts == {"moved": 2, "flagged": 1, "cleared": 1, "new": 3}
    shown = bench.shown()
    assert cells(shown["moves"]) == {(1, 0): 1, (0, 1): 1}
    assert shown["since"] == "before"
    index = shown["samples"]["id"].index("000007")
    assert numbers(shown["samples"]["before"])[index] == 1
    with pytest.raises(PencilError, match="nobody"):
        bench.report("report.since=nobody")


def test_the_page_has_the_curves_of_the_run_if_there_are_any(bench: ReviewBench) -> None:
    bench.report()
    assert bench.shown()["epochs"] == []
    figures = {"stage": "pencil", "corrected_share": 0.2, "label_entropy": 0.7, "label_accuracy_n": 12}
    figures |= {"given_label_accuracy": 0.5, "corrected_label_accuracy": 0.75}
    bench.keep_figures([{"epoch": 0, **figures, "test_accuracy": float("nan")}, {"epoch": 1, **figures}])
    bench.report()
    assert [epoch.get("test_accuracy") for epoch in bench.shown()["epochs"]] == [None, None]
    assert [epoch["label_entropy"] for epoch in bench.shown()["epochs"]] == [0.7, 0.7]
    assert "75.0 %" in bench.page.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("small_label_parts")
def test_scanning_in_stretches_gives_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReviewBench(tmp_path)
    bench.shard("00001.tar", samples(range(2500)))  # three parts of the label table
    bench.index()
    chance = np.random.default_rng(4)
    moved = {int(row): int(chance.integers(3)) for row in chance.choice(2500, 700, replace=False)}
    shares = {row: float(chance.uniform(0.4, 1.0)) for row in range(2500)}
    bench.publish(dict(list(moved.items())[:600]), name="before")
    bench.publish(moved, shares=shares)
    keys = ["report.since=before", "report.thumbnails=0", "report.audit=40", "report.listed=100"]
    bench.report(*keys)
    whole = bench.shown()
    monkeypatch.setattr("pencil_scale.export.rows.STRETCH_ROWS", 1024)
    bench.report(*keys)
    parts = bench.shown()
    assert whole["counts"]["moved"] > 50
    for name in ("counts", "transitions", "moves", "scores"):
        assert parts[name] == whole[name]
    drawn = [{one["samples"]["id"][index] for index in one["audit"]["order"]} for one in (whole, parts)]
    assert drawn[0] == drawn[1]
    listed = [set(one["samples"]["id"][: one["num_listed"]]) for one in (whole, parts)]
    assert len(listed[0] & listed[1]) >= 95


# --- which samples -----------------------------------------------------------------------------------


def test_the_share_of_a_transition_grows_with_the_square_root_of_its_size() -> None:
    sizes = {(0, 1): 6400, (2, 3): 1600, (4, 5): 100}
    given, suggested = (np.repeat([pair[side] for pair in sizes], list(sizes.values())) for side in (0, 1))
    margin = np.random.default_rng(0).random(len(given)).astype(np.float32)
    size = np.repeat(list(sizes.values()), list(sizes.values()))
    chosen = by_transition(given, suggested, margin, margin, size)[:130]
    assert np.bincount(given[chosen])[[0, 2, 4]].tolist() == [80, 40, 10]  # as 80 : 40 : 10, their roots


def test_within_a_change_doubtful_and_certain_labels_alternate_and_kept_ones_go_by_score() -> None:
    margin = np.array([0.3, 0.9, 0.1, 0.6, 0.2], np.float32)
    given, ones = np.zeros(5, np.int64), np.ones(5, np.int64)
    chosen = by_transition(given, ones, margin, margin, np.full(5, 5))
    assert margin[chosen].tolist() == pytest.approx([0.1, 0.9, 0.2, 0.6, 0.3])
    kept = by_transition(given, given, margin, np.zeros(5, np.float32), np.full(5, 5))
    assert margin[kept].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.6, 0.9])


def test_the_most_doubtful_labels_are_listed_whether_they_were_changed_or_kept() -> None:
    chance = np.random.default_rng(5)
    given = chance.integers(0, 5, 2000)
    suggested = np.where(chance.random(2000) < 0.1, 5, given)
    score = chance.random(2000).astype(np.float32)
    size = np.bincount(given * 10 + suggested)[given * 10 + suggested]
    chosen = pick(given, suggested, score, np.ones(2000, np.float32), size, 100)
    most_doubtful = np.argsort(score)[:50]
    assert set(most_doubtful) <= set(chosen)
    assert 0 < (given == suggested)[most_doubtful].sum() < 50
    assert {tuple(pair) for pair in zip(given[chosen], suggested[chosen], strict=True)} == {
        (one, other) for one in range(5) for other in (one, 5)
    }


def test_picking_again_from_the_picks_of_some_parts_is_like_picking_from_all() -> None:
    chance = np.random.default_rng(3)
    given, suggested = chance.integers(0, 4, 3000), 4 + chance.integers(0, 3, 3000)
    score, margin = chance.random((2, 3000)).astype(np.float32)
    cell = given * 10 + suggested
    size = np.bincount(cell)[cell]
    whole = pick(given, suggested, score, margin, size, 60)
    parts = []
    for some in np.array_split(np.arange(3000), 5):
        here = np.bincount(cell[some])[cell[some]]
        parts.append(some[pick(given[some], suggested[some], score[some], margin[some], here, 60)])
    union = np.concatenate(parts)
    again = union[pick(given[union], suggested[union], score[union], margin[union], size[union], 60)]
    assert len(np.intersect1d(whole, again)) >= 57  # ranks at the edge of a part may differ


def test_labels_are_ranked_by_doubt_even_if_none_changed(bench: ReviewBench) -> None:
    bench.publish({}, shares={5: 0.4, 8: 0.5, 2: 0.6})
    bench.report()
    shown = bench.shown()
    assert ("changed" in shown["counts"], shown["num_listed"]) == (False, 12)
    scores = dict(zip(shown["samples"]["id"], numbers(shown["samples"]["label_score"]), strict=True))
    assert sorted(scores, key=lambda one: scores[one])[:3] == ["000005", "000008", "000002"]
    assert shown["samples"]["id"][0] == "000005"


# --- how good the network is -------------------------------------------------------------------------


def text_of(html: str) -> str:
    """What a reader sees of a page before its script has run."""
    html = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_the_top_of_the_page_says_how_good_the_network_is_and_what_cannot_be_detected(
    bench: ReviewBench,
) -> None:
    bench.report()
    seen = text_of(bench.page.read_text())
    assert "accuracy unknown no clean labels" in seen
    assert "chance level 33.3 % of guessing among 3 classes" in seen
    assert "watched" not in seen
    assert "gain of the repair" not in seen
    for limit in (
        "the majority for their kind of image",
        "people and the network share",
        "swapped class names",
        "harm in small subgroups",
    ):
        assert limit in seen
    bench.keep_figures([{"epoch": 0, "stage": "pencil", "test_accuracy": 0.5, "balanced_agreement": 0.625}])
    facts = {"test_accuracy": 0.875, "watch_agreement": 0.75, "held_because": [], "model": "s3://me:secret@x"}
    facts |= {"wrong_labels": 1494, "wrong_labels_low": 1380, "wrong_labels_high": 1610.4}
    facts |= {"proven_wrong": 1234}
    facts |= {"gain": 0.123, "gain_low": -0.01, "gain_high": 0.25}
    bench.keep_summary(facts)
    bench.report()
    seen = text_of(bench.page.read_text())
    assert "accuracy on the test set 87.5 %" in seen  # of the labels, not of the last epoch
    assert "agreement on watched samples 75.0 %" in seen
    assert "training agreement 62.5 %" in seen
    assert "labels wrong at random ≈ 1,494 estimated, 90 % interval 1,380 to 1,610" in seen
    assert "labels proven wrong ≥ 1,234 the clean set shows it" in seen
    assert "gain of the repair +12.3 % of all labels, put right minus spoiled" in seen
    assert "estimated, 90 % interval -1.0 % to +25.0 %" in seen
    assert seen.index("accuracy on the test set") < seen.index("most frequent change")
    assert "secret" not in bench.page.read_text()


def test_one_label_is_not_counted_as_labels(bench: ReviewBench) -> None:
    bench.publish({1: 2})
    bench.report()
    seen = text_of(bench.page.read_text())
    assert "1 label with a new class" in seen
    assert not re.search(r"\b1 (labels|samples|pictures)\b", seen)


def test_the_page_never_speaks_of_noise(bench: ReviewBench) -> None:
    bench.report()
    assert "noise" not in bench.page.read_text().lower()


def test_a_figure_that_is_unknown_is_left_out() -> None:
    names = [fact.name for fact in network_facts({"gain": float("nan"), "wrong_labels": None}, 10)]
    assert names == ["accuracy", "chance level"]
    (fact,) = [one for one in network_facts({"gain": 0.1}, 10) if one.name == "gain of the repair"]
    assert "interval" not in fact.detail
    fact = network_facts({"gain": 0.1, "gain_true": -0.02}, 10)[-1]
    assert fact.detail.endswith("estimated; by the true classes -2.0 %")


def test_labels_that_were_held_or_got_worse_are_marked() -> None:
    known = {"held_because": ["weak network"], "given_label_accuracy": 0.696, "label_accuracy_n": 5000}
    held, *ways = network_notes(known, "bad", held_because=["x", "y"])
    assert (held, ways) == ("These labels are held: x; y.", ways_on("bad"))
    promoted, worse = network_notes(known | {"corrected_label_accuracy": 0.339}, "bad", held_because=())
    assert promoted == "The run found reasons to hold these labels: weak network."
    blind = {"warnings": {"evidence": "nothing could be measured: too few samples are watched; review"}}
    assert network_notes(blind, "bad", held_because=()) == [
        "Nothing could be measured: too few samples are watched."
    ]
    warned = network_notes({"warnings": {"gate": "at chance"}}, "bad", held_because=())
    assert warned == ["These labels would have been held (gate.hold=false): at chance."]
    assert worse == (
        "WORSE: of 5,000 labels whose true class is known, 3,480 were right as given and 1,695 are right now."
    )


# --- what must not be on the page --------------------------------------------------------------------


def test_excluded_ids_are_not_on_the_page_even_before_they_are_indexed(bench: ReviewBench) -> None:
    bench.report()
    assert "000007" in bench.page.read_text()
    (bench.folder / "gone.txt").write_text("000007\n")
    bench.report(f"data.exclude={bench.folder}/gone.txt")
    assert "000007" not in bench.page.read_text()


def test_no_data_can_close_its_html_element_and_all_of_it_survives() -> None:
    hostile = {"id": ["</script><script>alert(1)</script>", "<!--", "]]>", "\u2028\u2029 & é 𝄞", "\x00\x1f"]}
    text = as_json(hostile)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == hostile


def test_the_content_policy_allows_only_the_script_and_style_of_the_page(bench: ReviewBench) -> None:
    bench.report()
    page = bench.page.read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    style, script = (re.findall(f"<{name}>(.*?)</{name}>", page, re.S)[0] for name in ("style", "script"))
    assert policy.replace("&#39;", "'") == content_policy(style, script)
    assert policy.startswith("default-src &#39;none&#39;;")
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)


def test_the_password_of_a_store_is_blanked() -> None:
    import pyarrow as pa

    from pencil_scale.review.page import _columns
    from pencil_scale.review.scan import SAMPLES

    entry = dict.fromkeys(("row", "given_label", "predicted_label", "label_score", "confidence", "margin"), 0)
    entry |= {"sample_id": "a", "key": "a", "top_labels": [0], "top_shares": [1.0]}
    table = pa.Table.from_pylist([entry | {"shard": "https://me:secret@host/0.tar"}], schema=SAMPLES)
    assert _columns(table, {})["shards"] == ["https://me:***@host/0.tar"]


# --- pictures, copies, the command -------------------------------------------------------------------


def test_the_number_of_thumbnails_can_be_limited(bench: ReviewBench) -> None:
    bench.report("report.thumbnails=0")
    assert "data:image/" not in bench.page.read_text()
    bench.report("report.thumbnails=1", "report.audit=0", "report.listed=2")
    assert [picture is not None for picture in bench.shown()["thumbnails"]] == [True, False]


def test_photos_have_thumbnails_of_224_pixels_and_small_images_keep_their_pixels(tmp_path: Path) -> None:
    bench = ReviewBench(tmp_path)
    photo, small = image(1, "JPEG", size=300), image(2, size=28)
    bench.shard("a.tar", [("p.jpg", photo), ("p.cls", b"0"), ("s.png", small), ("s.cls", b"1")])
    found = make_thumbnails(
        bench.index().catalogue, np.array([0, 1]), Config.model_fields["report"].default.thumbnail_px
    )
    sizes = [(kind, Image.open(io.BytesIO(data)).size) for kind, data in found.pictures.values()]
    assert sizes == [("webp", (224, 224)), ("png", (28, 28))]
    assert found.largest_px == 224
    pixels = [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in (found.pictures[1][1], small)]
    np.testing.assert_array_equal(*pixels)


def test_only_the_thumbnails_of_a_changed_shard_are_missing_and_it_is_named(bench: ReviewBench) -> None:
    bench.shard("00042.tar", samples(range(6, 13)))
    bench.report()
    shown = bench.shown()
    seen = {name for name, one in zip(shown["samples"]["id"], shown["thumbnails"], strict=True) if one}
    assert seen == {f"{row:06d}" for row in range(6)}
    assert re.search(r"6 pictures cannot be shown; the first one: shard .*00042.tar", bench.page.read_text())


@pytest.mark.slow
def test_a_copy_of_the_page_is_kept_with_its_run_in_mlflow(bench: ReviewBench, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri, uri)
    tags = {"pencil_scale.run_id": "ab12", "pencil_scale.stage": "parent"}
    client.create_run(client.create_experiment("e", f"{tmp_path}/artifacts"), tags=tags)
    config = load_config(bench.config, [f"tracking.uri={uri}"])
    assert copy_page(config, {"run_id": "ab12", "experiment": "e"}, "report.html", "<p>é</p>") is None
    (found,) = (tmp_path / "artifacts").rglob("report.html")
    assert found.read_text() == "<p>é</p>"
    assert copy_page(config, {}, "report.html", "") == "MLflow knows no run of these labels"
    another = {"run_id": "cd34", "experiment": "e"}
    assert copy_page(config, another, "report.html", "") == "MLflow has no run for 'parent'"


def test_the_command_writes_the_page_to_the_storage_and_prints_the_results_of_an_audit(
    bench: ReviewBench, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    assert main([str(bench.config), "report.page=out/"]) == 2
    assert "name a file that ends in .html" in capsys.readouterr().err
    assert main([str(bench.config)]) == 0
    said = capsys.readouterr().out
    assert f"{bench.storage}/reports/t.html" in said
    assert "none: MLflow knows no run of these labels" in said
    with fsspec.open(f"{bench.storage}/reports/t.html") as file:
        (bench.folder / "copy.html").write_bytes(file.read())
    assert shown_in(bench.folder / "copy.html")["run"] == "t"
    entry = {"sample_id": "000001", "class": 2, "given": 1, "suggested": 2, "audit": CHANGED}
    entry |= {"confidence": 0.8}
    bench.keep_summary({"gain": 0.12, "gain_low": 0.1, "gain_high": 0.14})
    known = {kind: {"all": 100, "drawn": 50} for kind in (CHANGED, UNCHANGED)}
    head = {
        "kind": "pencil_scale decisions",
        "version": 3,
        "run": "t",
        "audit": known,
        "decisions": [entry] * 20,
    }
    (bench.folder / "d.json").write_text(json.dumps(head))
    assert main([str(bench.config), f"report.judged={bench.folder}/d.json"]) == 0
    said = capsys.readouterr().out
    seen = " ".join(said.replace("│", " ").split())
    assert "correct repairs 100.0 % (95 % interval 85.0 % to 100.0 %)" in seen
    assert "wrong, unchanged unknown" in seen
    assert "gain of the repair +50.0 % (95 % interval +33.0 % to +50.0 %)" in seen
    assert "estimated by the run +12.0 %" in seen
    assert "confidence 0.70 to 0.90 0.800 on average, 1.000 of 20 judged labels right" in seen


def test_a_file_that_is_not_a_review_page_is_not_overwritten(bench: ReviewBench) -> None:
    bench.publish({1: 2})
    bench.page.write_text("<html>my own page</html>")
    with pytest.raises(PencilError, match="exists and is not a review page; nothing was overwritten"):
        bench.report()
    assert bench.page.read_text() == "<html>my own page</html>"
    bench.page.unlink()
    bench.report()
    bench.report()  # a review page is overwritten
