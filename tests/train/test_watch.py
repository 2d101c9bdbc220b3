"""Watched samples: every rank knows what all predicted, and the best epoch is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_making import names, new_table
from loops import DEMO
from torch import Tensor, nn

from pencil_scale.config.loader import load_config
from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.labels.roles import judges
from pencil_scale.method.proof import no_counts
from pencil_scale.train.checkpoints import Kept, Progress, Saved
from pencil_scale.train.preparation import Preparation
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.watch import Watch, is_best, no_proof, predicts_plainly, proof_of

NUM = 40
ROWS = np.arange(NUM)
PLANTED = np.arange(NUM, NUM + 20)


class Lookup(nn.Module):
    """Predicts class 1 for the images whose brightness is listed, else class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bright: set[int] = set()

    def forward(self, images: Tensor) -> Tensor:
        values = (images[:, 0, 0, 0] * 255).round().int().tolist()
        return torch.eye(2)[[int(value in self.bright) for value in values]] * 5


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Forty images, each as bright as its row number, all given class 1; twenty other rows have errors."""
    plain = ["images.mean=[0,0,0]", "images.std=[1,1,1]", "images.crop=8", "images.pad=0"]
    images = torch.arange(NUM, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
    batch = Batch(torch.arange(NUM), images, torch.ones(NUM), noisy_class=torch.ones(NUM, dtype=torch.int64))
    config = load_config(DEMO, plain)
    preparation = Preparation(config, torch.device("cpu"), lambda row, reason: reason)
    table = new_table(tmp_path, np.ones(NUM + len(PLANTED), np.int64), names(2))
    with Owners(table, 0, 1) as owners:
        planted = PLANTED, np.ones(len(PLANTED), np.int32)
        yield Watch(lambda: iter([batch]), preparation, Ranks(), owners, None, planted)


def train(watch: Watch, epoch: int, num_learned: int) -> None:
    """Predict the samples with planted errors, as a step does; the first ones as the error."""
    classes = (torch.arange(len(PLANTED)) >= num_learned).float()
    predicted = torch.stack([classes, 1 - classes, torch.full_like(classes, -0.1), classes - 3], dim=1)
    watch._owners.mark(torch.from_numpy(PLANTED), predicted, epoch)


def test_agreement_is_counted_apart_for_the_samples_that_select_and_those_that_judge(watch: Watch) -> None:
    model = Lookup()
    model.bright = set(ROWS[~judges(ROWS)].tolist())
    found = watch.look(model, "backbone", 0)
    assert (found["watch_agreement"], found["watch_agreement_judged"]) == (1.0, 0.0)
    assert found["watched_selecting"] == len(model.bright) == watch.num_selecting


def test_the_judging_samples_are_compared_one_by_one_with_the_best_epoch_before_labels_moved(
    watch: Watch,
) -> None:
    model, judging = Lookup(), ROWS[judges(ROWS)].tolist()
    for number, bright in enumerate((ROWS.tolist(), judging)):  # the first is better by the selecting half
        model.bright = set(bright)
        watch.look(model, "backbone", number)
        watch.keep(number + 1, model, None)
    assert watch.start_to_move().epoch == 1
    model.bright = set(judging[3:])
    found = watch.look(model, "pencil", 2)
    assert (found["watch_lost"], found["watch_won"]) == (3, 0)


def test_an_epoch_that_learns_planted_errors_is_not_the_best_though_it_predicts_watched_samples_as_well(
    watch: Watch,
) -> None:
    model = Lookup()
    model.bright = set(ROWS.tolist())
    found = []
    for number, num_learned in enumerate((0, 0, 10)):
        train(watch, number, num_learned)
        found.append(watch.look(model, "pencil", number))
        watch.keep(number + 1, model, None)
    assert [one["watch_agreement"] for one in found] == [1.0, 1.0, 1.0]
    selecting = PLANTED[~judges(PLANTED)]
    assert [one["planted_selecting"] for one in found] == [len(selecting)] * 3
    shares = [one["planted_agreement"] for one in found]
    assert shares == [1.0, 1.0, (selecting >= PLANTED[10]).mean()]
    assert watch.best.epoch == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", True),
        ("stages.finetune.mixup=1", False),
        ("stages.finetune.mixup=1 stages.finetune.average=0.99", True),
        ("stages.pencil.augment=strong", False),
        ("stages.pencil.augment=strong stages.pencil.teacher=0.99", True),
        ("stages.finetune.mixup=1 stages.finetune.epochs=0", True),
        ("stages.backbone.mixup=1", True),
    ],
)
def test_planted_errors_count_only_if_they_are_predicted_as_watched_samples_are(
    overrides: str, expected: bool
) -> None:
    assert predicts_plainly(load_config(DEMO, overrides.split()).stages) == expected


def test_planted_errors_that_were_never_predicted_do_not_count(watch: Watch) -> None:
    assert "planted_agreement" not in watch.look(Lookup(), "backbone", 0)


def test_a_network_that_was_trained_before_is_compared_with_itself_at_the_start(watch: Watch) -> None:
    model, judging = Lookup(), ROWS[judges(ROWS)].tolist()
    model.bright = set(judging[:5])
    watch.look(model, "start", None)
    model.bright = set(judging[4:6])
    found = watch.look(model, "pencil", 0)
    assert (found["watch_lost"], found["watch_won"]) == (4, 1)


def test_a_run_that_resumes_knows_its_best_epoch(watch: Watch) -> None:
    def resumed(step: int, best: Kept | None) -> Kept | None:
        figures = [{"stage": "backbone", "watch_agreement": 0.5, "watched_selecting": 600}]
        progress = Progress(epoch=1, step=step)
        saved = Saved("id", {"here": torch.ones(1)}, {}, progress, None, figures, best, agreed=[1])
        watch = Watch(None, None, Ranks(), None, saved)
        assert watch.num_selecting == 600  # asked before anything is predicted, where the first stage ended
        return watch.best

    earlier = Kept(1, {"there": torch.ones(1)}, None)
    assert resumed(step=3, best=earlier) is earlier
    assert resumed(step=3, best=None) is None
    assert list(resumed(step=0, best=None).weights) == ["here"]


def test_the_latest_epoch_that_is_not_clearly_worse_is_the_best() -> None:
    assert is_best([0.5], 100)
    assert is_best([0.50, 0.49], 100)
    assert not is_best([0.50, 0.40], 100)
    assert not is_best([0.50, 0.49], 100_000)


def epoch(stage: str, errs_up_to: int) -> dict[str, Any]:
    """An epoch whose network contradicts labels by two margins, and is wrong up to a margin."""
    clean, watched = no_counts(), no_counts()
    for margin in (5, 15):
        clean[0, margin], watched[0, margin] = 200 * (margin <= errs_up_to), 250
    for counts in (clean, watched):
        counts[0, 0] = counts[1, 9] = 1000
        counts[0, 0] -= counts[0, 1:].sum()
    return {"stage": stage, "clean_counts": clean.tolist(), "watched_counts": watched.tolist()}


def test_the_clean_set_proves_only_what_it_proves_of_both_networks_whose_predictions_count() -> None:
    better, worse = epoch("finetune", errs_up_to=0), epoch("pencil", errs_up_to=5)
    useless = epoch("pencil", errs_up_to=15)
    both, first, last = (proof_of(figures, mixes=True) for figures in ([worse, better], [better], [worse]))
    assert both is not None
    assert first is not None
    assert both == last
    assert first.min_margin < both.min_margin
    assert proof_of([useless, better], mixes=True) is None
    assert proof_of([useless | {"stage": "backbone"}, better], mixes=True) is None
    assert proof_of([worse, better]) == first  # the last stage has predicted all samples


def test_without_watched_samples_the_clean_set_proves_nothing() -> None:
    some = epoch("finetune", errs_up_to=0)
    del some["watched_counts"]
    assert proof_of([some]) is None
    assert proof_of([]) is None
    assert "no samples are watched" in no_proof([some])


def test_why_a_clean_set_proves_nothing_is_said() -> None:
    weak, easy = epoch("finetune", errs_up_to=15), epoch("finetune", errs_up_to=0)
    assert "where the network contradicts labels, it may be wrong itself" in no_proof([weak])
    assert "right for 0.60 of the clean samples, and agrees with 0.50 of the watched" in no_proof([weak])
    easy["clean_counts"][1].reverse()
    assert proof_of([easy]) is None
    assert "seems to come from another source" in no_proof([easy])
