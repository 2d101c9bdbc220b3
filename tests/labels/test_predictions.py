"""The table keeps the prediction of each row's last visit; watched rows are predicted, never trained on."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from catalogue_making import Bench, samples
from label_making import names, new_labels, pin_rows, predicted

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.labels.columns import FREE, PINNED, PLANTED, WATCHED, Int64s, key_bytes, scaled_one_hot
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import PINS, Pinned
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.labels.start_labels import append, forget, regive, remap, set_roles, start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.decisions import decide
from pencil_scale.method.evidence import TOP, NoiseModel, judge
from pencil_scale.storage.errors import PencilError

NUM_ROWS, NUM_CLASSES = 3000, TOP + 2  # three parts; two classes of a prediction are not kept
PLANT = (np.array([3, 1500]), np.array([0, 6], np.int32))
WATCH = np.array([4, 1024, 2999])


def rows_of(*rows: int) -> Int64s:
    return np.array(rows, np.int64)


def with_roles(folder: Path) -> Manifest:
    labels = new_labels(folder / "store", np.arange(NUM_ROWS) % NUM_CLASSES, names(NUM_CLASSES))
    return set_roles(pin_rows(labels, {5: 2}), PLANT, WATCH)


@pytest.fixture
def table(tmp_path: Path) -> LabelTable:
    return LabelTable.restore(with_roles(tmp_path), tmp_path / "table")


def stored(table: LabelTable, rows: Int64s) -> np.ndarray:
    """The predictions of rows as they were packed, rounded to 16 bits."""
    columns = [table.read(rows, name) for name in ("predicted_class", "predicted_log_p")]
    return np.concatenate(columns, axis=1, dtype=np.float32)


def packed(rows: Int64s, seed: int = 0) -> np.ndarray:
    return predicted(rows, NUM_CLASSES, seed).astype(np.float16).astype(np.float32)


def test_a_new_row_has_no_prediction(table: LabelTable) -> None:
    assert np.isnan(table.read(np.arange(NUM_ROWS), "predicted_log_p")).all()


def test_a_visit_stores_the_prediction_whether_or_not_labels_move(table: LabelTable) -> None:
    moved, marked = rows_of(2048, 3, 7), rows_of(8, 1023, 5)
    table.write(moved, np.ones((3, NUM_CLASSES)), predicted(moved, NUM_CLASSES), epoch=0)
    table.mark(marked, predicted(marked, NUM_CLASSES), epoch=0)
    for rows in (moved, marked):
        assert np.array_equal(stored(table, rows), packed(rows))
    assert np.isnan(table.read(rows_of(9), "predicted_log_p")).all()
    table.mark(marked, predicted(marked, NUM_CLASSES, seed=1), epoch=1)
    assert np.array_equal(stored(table, marked), packed(marked, seed=1))


def test_a_row_that_could_not_be_predicted_keeps_its_prediction(table: LabelTable) -> None:
    rows = rows_of(8, 9)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    again = predicted(rows, NUM_CLASSES, seed=1)
    again[0] = np.nan
    table.mark(rows, again, epoch=1)
    assert np.array_equal(stored(table, rows), [packed(rows)[0], packed(rows, seed=1)[1]])
    assert table.count_visited(1) == 2


def test_a_prediction_of_the_wrong_size_is_refused(table: LabelTable) -> None:
    with pytest.raises(PencilError, match=rf"predictions of shape \(1, 5\); expected \(1, {2 * TOP}\)"):
        table.mark([8], np.zeros((1, 5)), epoch=0)


def test_a_watched_row_is_predicted_repeatedly_and_never_visited(table: LabelTable) -> None:
    rows = rows_of(4, 8, 2999)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    table.mark(WATCH, predicted(WATCH, NUM_CLASSES, seed=1), epoch=0)
    assert np.array_equal(stored(table, WATCH), packed(WATCH, seed=1))
    assert table.read(rows, "last_epoch").tolist() == [0, 1, 0]
    assert table.count_visited(0) == 1
    with pytest.raises(PencilError, match="row 4 and 1 more: watched, so its label does not move"):
        table.write(rows, np.ones((3, NUM_CLASSES)), None, epoch=1)
    assert table.count_visited(1) == 0


def test_a_prediction_alone_reaches_the_next_snapshot(table: LabelTable, tmp_path: Path) -> None:
    before = table.snapshot()
    table.mark(WATCH[:1], predicted(WATCH[:1], NUM_CLASSES), epoch=0)
    after = table.snapshot()
    assert [part for part in range(3) if after.parts[part] != before.parts[part]] == [0]
    assert after.newest_epoch == before.newest_epoch
    again = LabelTable.restore(after, tmp_path / "again")
    assert np.array_equal(stored(again, WATCH[:1]), packed(WATCH[:1]))


def test_planted_rows_start_at_their_wrong_class_and_pins_win(tmp_path: Path) -> None:
    table = LabelTable.restore(
        set_roles(with_roles(tmp_path), (rows_of(3, 5), PLANT[1]), WATCH), tmp_path / "t"
    )
    assert table.read(rows_of(3, 4, 5, 6, 1500), "role").tolist() == [PLANTED, WATCHED, PINNED, FREE, FREE]
    assert table.read(rows_of(3, 4, 5, 1500), "noisy_class").tolist() == [0, 4, 2, 6]
    assert table.read(rows_of(3, 4, 5)).argmax(axis=1).tolist() == [0, 4, 2]
    table.write(rows_of(3), np.ones((1, NUM_CLASSES)), None, epoch=0)  # it is trained like any other
    assert table.read(rows_of(3)).tolist() == [[1] * NUM_CLASSES]


def test_only_parts_whose_roles_change_are_written(tmp_path: Path) -> None:
    first = with_roles(tmp_path)
    second = set_roles(first, (PLANT[0][:1], PLANT[1][:1]), WATCH)
    assert [part for part in range(3) if first.parts[part] != second.parts[part]] == [1]
    assert set_roles(second, (PLANT[0][:1], PLANT[1][:1]), WATCH) == second


def test_a_regiven_row_is_free_and_keeps_its_prediction(table: LabelTable) -> None:
    rows = rows_of(3, 4, 5, 8, 9)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    top = table.read(rows, "predicted_class")
    other = np.array([np.setdiff1d(np.arange(NUM_CLASSES), of)[0] for of in top])
    classes = np.array([top[0, 1], other[1], 0, -1, top[4, 0]], np.int32)
    labels = PublishedLabels(regive(table.snapshot(), rows, classes)).rows(range(10))
    assert labels.role[rows].tolist() == [FREE, FREE, PINNED, FREE, FREE]
    assert labels.noisy_class[rows].tolist() == [classes[0], classes[1], 2, -1, classes[4]]
    assert np.array_equal(labels.predicted_class[rows], top)
    assert labels.last_epoch[rows].tolist() == [1, 0, 1, 1, 1]


def test_a_row_whose_prediction_is_forgotten_is_undecided_and_trained_before(table: LabelTable) -> None:
    rows = np.arange(10)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    noise = asdict(NoiseModel(1.0, 0.1, 0.1, 0.05, 0.2, since=1))
    labels = PublishedLabels(replace(forget(table.snapshot(), rows_of(3, 8)), noise=noise)).rows(range(10))
    assert np.flatnonzero(labels.is_undecided).tolist() == [3, 8]
    assert np.flatnonzero(~labels.has_evidence & ~labels.pinned).tolist() == [3, 8]
    assert labels.decide().corrected_class[[3, 8]].tolist() == labels.noisy_class[[3, 8]].tolist()
    assert (labels.last_epoch[[3, 8]] == 1).all()


def test_without_evidence_a_trained_row_is_undecided_as_long_as_its_label_is_untouched(
    table: LabelTable,
) -> None:
    trained, nothing = rows_of(6, 7), np.full((2, 2 * TOP), np.nan)
    table.mark(trained, nothing, epoch=0)
    table.write(rows_of(8), table.read(rows_of(8), "label_logits") + 0.1, nothing[:1], epoch=0)
    labels = PublishedLabels(table.snapshot()).rows(range(10))
    assert np.flatnonzero(labels.is_undecided).tolist() == [6, 7]


def test_a_night_keeps_the_predictions_of_rows_it_knows(table: LabelTable) -> None:
    rows = np.arange(NUM_ROWS)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    night = append(table.snapshot().for_new_run("tonight"), [1] * 200)
    labels = PublishedLabels(set_roles(night, None, np.append(WATCH, 3100))).rows(range(3200))
    known = labels.predictions()
    assert np.array_equal(known.classes[:NUM_ROWS], packed(rows)[:, :TOP])
    assert np.isnan(known.log_p[NUM_ROWS:]).all()
    assert labels.role[[3, 4, 1500, 2999, 3100, 3199]].tolist() == [
        FREE,
        WATCHED,
        FREE,
        WATCHED,
        WATCHED,
        FREE,
    ]


def test_another_class_list_keeps_roles_and_adds_up_predictions(table: LabelTable) -> None:
    rows = np.arange(NUM_ROWS - 1)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    labels = table.snapshot()
    old = PublishedLabels(labels).rows(range(NUM_ROWS)).predictions()
    changed, _ = remap(
        labels, [[0], [1, 2], [], [3, 5, 6]], names(4)
    )  # class 4 is dropped, and so is the last
    new = PublishedLabels(changed).rows(range(NUM_ROWS))
    assert new.role[[3, 4, 5, 6]].tolist() == [PLANTED, WATCHED, PINNED, FREE]
    assert new.last_epoch[[3, 4, 5]].tolist() == [1, 0, 1]
    assert np.isnan(new.predicted_log_p[-1]).all()
    remaining = 1 - np.exp(old.log_p[:-1]).sum(axis=1, keepdims=True)
    shares = np.repeat(remaining / (NUM_CLASSES - TOP), NUM_CLASSES, axis=1)
    np.put_along_axis(shares, old.classes[:-1], np.exp(old.log_p[:-1]), axis=1)
    merged = np.stack([shares[:, 0], shares[:, 1:3].sum(1), 0 * shares[:, 0], shares[:, [3, 5, 6]].sum(1)], 1)
    merged /= merged.sum(axis=1, keepdims=True)
    found = new.predictions()
    assert np.allclose(np.exp(found.log_p[:-1]), -np.sort(-merged, axis=1), atol=0.01)


@pytest.mark.parametrize("num_classes", [2, 3, TOP - 1, TOP])
def test_few_classes_are_all_kept(tmp_path: Path, num_classes: int) -> None:
    rows = np.arange(50)
    table = LabelTable.restore(new_labels(tmp_path, rows % num_classes, names(num_classes)), tmp_path / "t")
    table.mark(rows, predicted(rows, num_classes), epoch=0)
    found = PublishedLabels(table.snapshot()).rows(range(50)).predictions()
    assert np.sort(found.classes).tolist() == [[*range(num_classes)]] * 50
    shares, other = found.calibrated(1.0, 1.0)
    assert np.allclose(shares.sum(axis=1), 1)
    expected = np.exp(predicted(rows, num_classes)[:, num_classes:])
    assert np.allclose(shares, expected, atol=0.01)
    for place in range(num_classes):
        assert np.array_equal(found.of_class(found.classes[:, place], shares, other), shares[:, place])


NOISE = {"temperature": 1.0, "replaced": 0.3, "wrong": 0.2, "wrong_low": 0.15, "wrong_high": 0.25}


def test_the_noise_is_kept_in_the_manifest_and_by_snapshots(table: LabelTable, tmp_path: Path) -> None:
    labels = table.snapshot()
    assert labels.noise is None
    noisy = replace(labels, noise={**NOISE, "min_log_odds": 0.1})
    again = LabelTable.restore(Manifest.decode(noisy.encode()), tmp_path / "again")
    assert again.snapshot() == noisy
    assert noisy.for_new_run("tonight").noise == noisy.noise  # a night starts from its parent's decisions


def test_labels_are_decided_by_predictions_where_the_noise_is_known(table: LabelTable) -> None:
    rows = np.delete(np.arange(NUM_ROWS), 6)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    labels = regive(table.snapshot(), rows_of(9), np.array([-1], np.int32))
    learned = PublishedLabels(labels).rows(range(NUM_ROWS))
    by_logits = decide(learned.logits, learned.noisy_class)
    for name, values in vars(learned.decide()).items():
        assert np.array_equal(values, getattr(by_logits, name), equal_nan=name == "score")

    found = PublishedLabels(replace(labels, noise=NOISE)).rows(range(NUM_ROWS))
    decisions, expected = found.decide(), np.array([5, 6, 9])  # pinned, never predicted, no class
    assert np.flatnonzero(~found.has_evidence).tolist() == expected.tolist()
    assert np.array_equal(decisions.corrected_class[expected], by_logits.corrected_class[expected])
    some = found.has_evidence
    judged = judge(found.predictions(some), found.noisy_class[some].astype(np.int64), NoiseModel(**NOISE))
    assert 0 < np.count_nonzero(judged.log_odds > 0) < len(judged.log_odds)
    assert np.array_equal(decisions.changed[some], judged.log_odds > 0)
    assert np.array_equal(decisions.score[some], judged.given_right.astype(np.float32))


def test_the_order_of_the_class_list_does_not_change_a_decision(table: LabelTable) -> None:
    rows = np.arange(NUM_ROWS)
    table.mark(rows, predicted(rows, NUM_CLASSES), epoch=0)
    found = PublishedLabels(replace(table.snapshot(), noise=NOISE)).rows(range(NUM_ROWS))
    order = ClassOrder.between(names(NUM_CLASSES), names(NUM_CLASSES)[::-1], "labels")
    other = found.under(order, order.classes(found.noisy_class)).decide()
    assert np.array_equal(other.corrected_class, NUM_CLASSES - 1 - found.decide().corrected_class)
    np.testing.assert_allclose(other.score, found.decide().score, rtol=1e-6)
    regiven = found.under(order, np.full(NUM_ROWS, 2)).decide()
    assert np.array_equal(regiven.changed, regiven.corrected_class != 2)
    assert 0 < regiven.num_changed < NUM_ROWS


def test_fresh_labels_plant_errors_and_watch_rows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(6)))  # classes 0, 1, 2 in turn
    bench.index()
    catalogue = Catalogue.open(bench.storage)
    keys = key_bytes(catalogue.read(0, 6, ["sample_key"])["sample_key"])
    pins = Pinned(rows_of(1, 5), keys[[1, 5]], np.array([0, 0]), PINS.empty_table())
    planted = rows_of(0, 1), np.array([2, 2], np.int32)
    labels = start_labels(catalogue, bench.storage, 10.0, pins, planted=planted, watched=rows_of(4, 5))
    found = PublishedLabels(labels).rows(range(6))
    assert found.role.tolist() == [PLANTED, PINNED, FREE, FREE, WATCHED, PINNED]
    assert found.noisy_class.tolist() == [2, 0, 2, 0, 1, 0]
    assert np.array_equal(found.logits, scaled_one_hot(found.noisy_class, 3, 10.0))
    repaired = regive(labels, planted[0][:1], np.array([0], np.int32))  # as before publishing
    plain = start_labels(catalogue, bench.storage, 10.0, pins, run=labels.run, watched=rows_of(4, 5))
    assert repaired.parts == plain.parts
