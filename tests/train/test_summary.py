"""The end of a run says whether its labels are held, what to do then, and whether they got worse."""

from typing import Any

import pytest

from pencil_scale.labels.run_record import ways_on
from pencil_scale.train.summary import Summary

TRUTH = {"given_label_accuracy": 0.7, "corrected_label_accuracy": 0.69, "label_accuracy_n": 1000}
WORSE = "WORSE: of 1,000 labels whose true class is known, 700 were right as given and 690 are right now"


def summary(status: str, **facts: Any) -> Summary:
    known = {"run": "a", "status": status, "held_because": ["no gain"], "warnings": {"gate": "no gain"}}
    return Summary({**known, **facts})


@pytest.mark.parametrize("status", ["held", "finished"])
def test_the_last_line_says_worse_if_the_truth_says_so(status: str) -> None:
    assert summary(status, **TRUTH).last_lines()[-1] == WORSE
    for facts in ({}, TRUTH | {"corrected_label_accuracy": 0.7}, {"given_label_accuracy": 0.7}):
        assert not any("WORSE" in line for line in summary(status, **facts).last_lines())


def test_a_held_run_says_why_and_what_to_do() -> None:
    lines = summary("held").last_lines()
    assert lines[:2] == ["HELD: no gain", "The labels of a are not published."]
    assert lines[2:] == ways_on("a")
    for words in (
        "Weak network or heavy noise: these cannot be told apart",
        "pretrained weights",
        "more epochs",
        "larger images",
        "100 to 200 changed samples in the blind audit",
        "promote CONFIG a",
    ):
        assert words in " ".join(lines)


def test_the_table_has_the_estimated_gain_with_its_interval_and_the_true_one() -> None:
    found = {"gain": 0.05, "gain_low": -0.01, "gain_high": 0.11, "gain_true": -0.02}
    found |= {"wrong_labels": 1494, "wrong_labels_low": 1380, "wrong_labels_high": 1610}
    found["wrong_labels_of"] = 5000
    assert summary("held", **found).table().splitlines() == [
        "labels wrong at random, estimated 1,494 of 5,000   (90 %: 1,380 to 1,610)",
        "gain in right labels, estimated   +0.0500   (90 %: -0.0100 to +0.1100)",
        "gain in right labels, true        -0.0200",
    ]


def test_the_table_counts_the_samples_of_one_training_if_there_were_several() -> None:
    assert summary("finished", trainings=4, samples=900, watched=300).table().splitlines()[1:] == [
        "samples trained on                900 in the last training",
        "samples watched                   300 in the last training",
    ]
    assert "training" not in summary("finished", watched=300).table()


@pytest.mark.parametrize("status", ["held", "finished"])
def test_a_clean_set_that_proves_nothing_is_a_warning_in_the_last_lines(status: str) -> None:
    assert "WARNING: no proof" in summary(status, warnings={"evidence.clean": "no proof"}).last_lines()
