"""What is printed during a run, and what the tracker gets."""

from itertools import count
from typing import Any

import numpy as np
import pytest

from pencil_scale.labels.report import Found
from pencil_scale.tracking.narrator import PICTURES_EVERY_S, Narrator, Untracked, transition_picture
from pencil_scale.train.checkpoints import Progress

FIGURES = {
    "stage": "pencil",
    "epoch": 11,
    "epoch_s": 3.0,
    "start_s": 0.0,
    "loss": 0.12345,
    "images_per_s": 1830.4,
    "test_accuracy": 0.9615,
    "corrected_label_accuracy": 0.931,
    "corrected_label_accuracy_low": 0.92,
    "corrected_label_accuracy_high": 0.94,
    "given_label_accuracy": 0.64,
    "corrected_share": 0.345,
}


class Listener:
    """Keeps the calls that a tracker would get."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, given))


def narrator(tracker: Any = None, clock: Any = None, later: int = 0) -> tuple[Narrator, list[str]]:
    said: list[str] = []
    clock = clock or (lambda: 0.0)
    told = tracker or Listener()
    return Narrator(40, ("ant", "bee"), told, say=said.append, clock=clock, later=later), said


def epoch(**found: Any) -> dict[str, Any]:
    nothing = {"figures": {}, "warnings": {}, "transitions": None}
    return {"kind": "epoch", "progress": Progress(12), "figures": FIGURES, "found": Found(**nothing | found)}


def test_a_training_that_is_not_tracked_prints_its_lines_and_draws_nothing() -> None:
    reporting, said = narrator(Untracked())
    started(reporting, epoch=11, record=[FIGURES])
    reporting.hear(epoch(warnings={"odd": "something is odd"}, transitions="not drawn"))
    assert [line.split()[0] for line in said] == ["training", "pencil", "WARNING:"]


def test_an_epoch_is_one_line_with_stage_speed_accuracies_and_remaining_time() -> None:
    now = [100.0]
    reporting, said = narrator(clock=lambda: now[0])
    started(reporting, epoch=11, record=[])
    now[0] += 3
    reporting.hear(epoch())
    assert said[1:] == [
        "pencil    epoch 12/40   loss 0.1235   1,830 images/s   test 0.962   labels right 0.931   "
        "changed 34.5%   ETA 0:01:24"
    ]


def test_an_epoch_line_says_what_training_waited_for() -> None:
    reporting, said = narrator()
    started(reporting, epoch=11, record=[])
    waits = {"data_wait_share": 0.021, "label_wait_share": 0.004, "gpu_wait_share": 0.8}
    reporting.hear({**epoch(), "figures": FIGURES | waits})
    assert "1,830 images/s   waits data 2%, GPU 80%   test 0.962" in said[1]


def started(reporting: Narrator, epoch: int = 0, step: int = 0, record: Any = ()) -> None:
    reporting.hear({"kind": "started", "progress": Progress(epoch, step), "record": record, "world": 2})


def test_the_first_estimate_leaves_out_what_starting_the_workers_took() -> None:
    now = [100.0]
    reporting, said = narrator(clock=lambda: now[0])
    started(reporting)
    for seconds, start_s in ((50.0, 47.0), (4.0, 0.5), (4.0, 0.5)):  # with evaluation and saving
        now[0] += seconds
        news = epoch()
        reporting.hear({**news, "figures": {**FIGURES, "epoch": 0, "start_s": start_s}})
    estimates = [line.rpartition("ETA ")[2] for line in said[1:]]
    assert estimates == ["0:01:57", "0:01:57", "0:02:36"]  # 39 times 3 s, 3 s and 4 s


def test_no_time_is_estimated_from_a_part_of_an_epoch() -> None:
    now = [100.0]
    reporting, said = narrator(clock=lambda: now[0])
    started(reporting, step=7)
    reporting.hear(epoch())
    now[0] += 2
    reporting.hear(epoch())
    assert "ETA" not in said[1]
    assert said[2].endswith("ETA 0:00:56")


def test_a_warning_is_printed_once_and_tracked_every_time() -> None:
    tracker = Listener()
    reporting, said = narrator(tracker)
    for _ in range(2):
        reporting.hear(epoch(warnings={"no_label_moved": "no label moved"}))
    assert said.count("WARNING: no label moved") == 1
    assert reporting.warnings == {"no_label_moved": "no label moved"}
    assert tracker.calls.count(("set_tag", ("warning.no_label_moved", "no label moved"))) == 2


def test_a_resumed_run_says_from_where_and_reports_again_what_may_be_missing() -> None:
    tracker = Listener()
    reporting, said = narrator(tracker)
    record = [FIGURES | {"epoch": number} for number in range(3)]
    reporting.hear({"kind": "started", "progress": Progress(3, 5, 77), "record": record, "world": 2})
    assert said == ["training with 2 workers from epoch 4, step 5"]
    assert [given[1] for name, given in tracker.calls if name == "log_epoch"] == [0, 1, 2]


def test_what_was_reported_is_written_as_soon_as_a_checkpoint_is_being_saved() -> None:
    for news in ({"kind": "saving"}, epoch(transitions=np.array([[3, 1], [0, 4]]))):
        tracker = Listener()
        reporting, _ = narrator(tracker)
        reporting.hear({"kind": "step", "stage": "pencil", "progress": Progress(), "figures": {"loss": 1.0}})
        reporting.hear(news)
        names = [name for name, _ in tracker.calls]
        assert names[0] == "log_step"
        assert names[-1] == "flush_soon"


def test_a_worker_that_died_is_reported_with_its_reason() -> None:
    reporting, said = narrator()
    reporting.hear({"kind": "failed", "reasons": {"worker 1": "ActorDiedError: the node is gone"}})
    assert said == ["worker 1 failed: ActorDiedError: the node is gone"]


def test_of_many_processes_that_wait_for_a_store_one_is_heard() -> None:
    told, lines = narrator()
    for text, stores in (
        ("s3://lake/1.tar does not answer", {"waits_for": "s3://lake"}),
        ("s3://lake/2.tar does not answer", {"waits_for": "s3://lake"}),
        ("s3://other/1.tar does not answer", {"waits_for": "s3://other"}),
        ("s3://lake answers again after 3 s", {"answers": "s3://lake"}),
        ("s3://lake answers again after 4 s", {"answers": "s3://lake"}),
        ("s3://lake/3.tar does not answer", {"waits_for": "s3://lake"}),
    ):
        told.hear({"kind": "logged", "text": text, **stores})
    heard = [line.split()[0] for line in lines]
    assert heard == ["s3://lake/1.tar", "s3://other/1.tar", "s3://lake", "s3://lake/3.tar"]


def test_moved_labels_are_drawn() -> None:
    tracker = Listener()
    reporting, _ = narrator(tracker)
    reporting.hear(epoch(transitions=np.array([[3, 1], [0, 4]])))
    assert [name for name, _ in pictures(tracker)] == ["class_transitions", "label_accuracy"]
    assert all(png.startswith(b"\x89PNG") for _, png in pictures(tracker))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_short_epochs_are_drawn_now_and_then_and_the_last_one_always(is_stopped: bool) -> None:
    now, tracker = [100.0], Listener()
    reporting, _ = narrator(tracker, clock=lambda: now[0])
    for number in range(30):
        figures = FIGURES | {"epoch": number}
        reporting.hear(epoch(transitions=np.array([[number, 1], [0, 4]])) | {"figures": figures})
        now[0] += 1
    assert len(pictures(tracker)) == 4  # after epochs 1 and 21, two each
    if is_stopped:
        reporting.draw()
    else:
        reporting.hear(epoch() | {"figures": FIGURES | {"epoch": 30, "stage": "finetune"}})
    assert [name for name, _ in pictures(tracker)] == ["class_transitions", "label_accuracy"] * 3
    last = transition_picture(np.array([[29, 1], [0, 4]]), ("ant", "bee"), "after epoch 30")
    assert pictures(tracker)[4] == ("class_transitions", last)
    reporting.draw()
    assert len(pictures(tracker)) == 6


def pictures(tracker: Listener) -> list[tuple[str, bytes]]:
    return [given for name, given in tracker.calls if name == "log_picture"]


def test_images_that_cannot_be_decoded_are_named_once_and_kept_for_the_summary() -> None:
    reporting, said = narrator()
    for _ in range(2):
        reporting.hear({"kind": "unreadable", "num": 3, "names": ["00.tar: 'a'", "00.tar: 'b'"]})
    text = "3 images cannot be decoded, weight set to 0: 00.tar: 'a'; 00.tar: 'b'; and 1 more"
    assert said == [f"WARNING: {text}"]
    assert reporting.warnings == {"unreadable_images": text}


def test_a_picture_that_cannot_be_drawn_is_logged_once_and_the_others_are_drawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Listener()
    reporting, _ = narrator(tracker, clock=count(step=PICTURES_EVERY_S).__next__)
    for _ in range(2):
        reporting.hear(epoch(transitions=np.zeros(3)))  # not a matrix
    assert [name for name, _ in pictures(tracker)] == ["label_accuracy"] * 2
    (message,) = caplog.messages
    assert message.startswith("the picture of class transitions failed (AxisError: axis 1 is out of bounds")


def test_a_failure_names_the_hosts_of_the_workers_and_those_that_were_silent() -> None:
    reporting, said = narrator()
    places = {0: ("a (10.0.0.1)", 3.0), 1: ("b (10.0.0.2)", 61.0)}
    reporting.hear({"kind": "failed", "reasons": {"worker 0": "OwnersError: timed out"}, "places": places})
    assert said == [
        "worker 0 was on a (10.0.0.1)",
        "worker 1 on b (10.0.0.2) has not been heard of for 61 s",
        "worker 0 failed: OwnersError: timed out",
    ]


def test_the_time_of_trainings_that_follow_is_included() -> None:
    now = [100.0]
    reporting, said = narrator(clock=lambda: now[0], later=3)
    started(reporting)
    now[0] += 2
    reporting.hear({**epoch(), "figures": {**FIGURES, "epoch": 0, "start_s": 0.0}})
    assert said[-1].endswith("ETA 0:05:18")  # 39 epochs and three times 40, of 2 s each
