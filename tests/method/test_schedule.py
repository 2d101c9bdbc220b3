"""The three stages with the settings of the paper, and the check before a run."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from pencil_scale.config.loader import load_config
from pencil_scale.method.outlook import check_outlook, label_scale
from pencil_scale.method.pencil import classification_loss, initial_logits, move_labels, pencil_loss
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"

CIFAR = (
    "stages.backbone.epochs=70 stages.pencil.epochs=130 stages.finetune.epochs=120 optimizer.tuned_batch=128"
)
CIFAR10_50 = f"{CIFAR} stages.backbone.rate=0.04 stages.pencil.rate=0.04 stages.pencil.beta=0.8"
CIFAR100 = f"{CIFAR} stages.pencil.rate=0.35 stages.pencil.lambda=10000 stages.pencil.tuned_classes=100"
DROPS = "stages.finetune.rate=0.2 stages.finetune.drop_after=[40,80]"
CLOTHING = (
    "stages.backbone.epochs=5 stages.pencil.epochs=10 stages.finetune.epochs=10 optimizer.tuned_batch=32 "
    "stages.pencil.tuned_classes=14 stages.pencil.alpha=0.08 stages.pencil.beta=0.8 "
    "stages.pencil.lambda=[[0,3000],[5,500]] stages.pencil.allow_fast_labels=true"
)


def schedule(overrides: str, num_classes: int = 10, batch: int | None = None) -> Schedule:
    config = load_config(DEMO, overrides.split())
    batch = batch or config.optimizer.tuned_batch
    return Schedule(config.stages, config.optimizer, num_classes, batch)


STAGE = schedule(CIFAR).stages.pencil


@pytest.mark.slow
def test_the_stages_follow_each_other() -> None:
    names = [schedule(CIFAR).stage_at(epoch).name for epoch in range(320)]
    assert names == ["backbone"] * 70 + ["pencil"] * 130 + ["finetune"] * 120
    with pytest.raises(IndexError, match="epochs 0 to 319"):
        schedule(CIFAR).stage_at(320)


def test_a_stage_of_no_epochs_is_left_out() -> None:
    assert schedule("stages.backbone.epochs=0").stage_at(0).name == "pencil"


def test_the_last_stage_divides_its_rate_at_each_drop() -> None:
    stages = schedule(f"{CIFAR} {DROPS}")
    rates = [stages.stage_at(200 + epoch).learning_rate for epoch in (0, 39, 40, 79, 80, 119)]
    assert rates == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002, 0.002])


def test_learning_rates_grow_with_the_batch_and_label_rates_do_not() -> None:
    small, large = schedule(CIFAR10_50), schedule(CIFAR10_50, batch=1024)
    assert large.stage_at(0).learning_rate == pytest.approx(8 * small.stage_at(0).learning_rate)
    assert large.stage_at(70).label_rate == small.stage_at(70).label_rate == pytest.approx(400 / 128 / 10)


def test_clothing1ms_labels_move_at_two_rates() -> None:
    stages = schedule(CLOTHING, num_classes=14)
    assert stages.label_rates() == pytest.approx([3000 / 32 / 14] * 5 + [500 / 32 / 14] * 5)
    assert stages.stage_at(5).pull == pytest.approx(1.12)


def test_labels_move_only_in_the_pencil_stage() -> None:
    stages = schedule(CIFAR)
    assert [stages.stage_at(epoch).moves_labels for epoch in (0, 69, 70, 199, 200)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    logits = torch.randn(4, 10)
    assert stages.stage_at(0).move_labels(torch.randn(4, 10), logits, torch.zeros(4)) is logits


def on_samples(stage: Stage, num_classes: int = 10) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    f, y = torch.randn(2, 5, num_classes, generator=random)
    k = torch.randint(num_classes, (5,), generator=random)
    return f, y, k, stage.loss(f, y, k)


def test_each_stage_has_the_loss_of_the_paper() -> None:
    stages = schedule(CIFAR10_50)
    f, y, k, loss = on_samples(stages.stage_at(0))
    assert_close(loss, -f.log_softmax(-1)[range(5), k])
    f, y, k, loss = on_samples(stages.stage_at(70))
    assert_close(loss, pencil_loss(f, y, k, alpha=0.1, beta=0.8))
    assert_close(stages.stage_at(70).move_labels(f, y, k), move_labels(f, y, k, 400 / 1280, 1.0))
    f, y, k, loss = on_samples(stages.stage_at(200))
    assert_close(loss, classification_loss(f, y))


def test_a_config_tuned_at_ten_classes_pulls_as_hard_at_four_hundred() -> None:
    stage = schedule(CIFAR10_50, num_classes=400).stage_at(70)
    f, y, k, loss = on_samples(stage, 400)
    assert_close(loss, pencil_loss(f, y, k, alpha=0.1 * 10 / 400, beta=0.8) * 400 / 10)
    y.requires_grad_()
    [gradient] = torch.autograd.grad(stage.loss(f, y, k).sum(), y)
    moved = y.detach() - 400 / 128 * gradient  # lambda over the batch it was tuned for
    assert_close(stage.move_labels(f, y.detach(), k), moved)


def test_the_check_before_a_run_reports_when_labels_change() -> None:
    assert "changes after 20 of 130 visits" in check_outlook(schedule(CIFAR10_50))
    assert "after 1 of 10 visits" in check_outlook(schedule(CLOTHING, 14))
    assert "after 1 of 1 visit " in check_outlook(schedule(f"{CLOTHING} stages.pencil.epochs=1", 14))


def test_a_stage_too_short_for_any_change_is_refused_with_numbers_that_change_a_label() -> None:
    short = "stages.pencil.epochs=5"
    with pytest.raises(PencilError, match="it takes 10 visits, and labels move in 5 epochs") as refused:
        check_outlook(schedule(short))
    tried = re.search(r"try (\S+) or (\S+), or set stages.pencil.allow_fixed_labels", str(refused.value))
    assert tried is not None
    for setting in tried.groups():
        assert " changes after " in check_outlook(schedule(f"{short} {setting}")), setting
    assert "WARNING" in check_outlook(schedule(f"{short} stages.pencil.allow_fixed_labels=true"))


@pytest.mark.slow
@pytest.mark.parametrize("curve", ['{"start":400,"end":0}', "[[0,400],[6,40]]", "[[0,40],[3,4000]]"])
def test_advice_for_a_short_stage_holds_for_a_lambda_that_varies(curve: str) -> None:
    short = f"stages.pencil.epochs=3 stages.pencil.lambda={curve}"
    with pytest.raises(PencilError) as refused:
        check_outlook(schedule(short))
    settings = re.findall(r"stages.pencil.(?:lambda|epochs)=\S+\b", str(refused.value))
    assert settings
    for setting in settings:
        assert " changes after " in check_outlook(schedule(f"{short} {setting}")), setting


@pytest.mark.slow
def test_numbers_that_change_no_label_are_refused_with_numbers_that_do() -> None:
    with pytest.raises(PencilError, match=r"try stages.pencil.alpha=0.01, or set .*allow_fixed_labels"):
        check_outlook(schedule(CIFAR100, 100))
    assert "changes after" in check_outlook(schedule(f"{CIFAR100} stages.pencil.alpha=0.01", 100))


def test_the_papers_cifar100_run_can_be_forced() -> None:
    line = check_outlook(schedule(f"{CIFAR100} stages.pencil.allow_fixed_labels=true", 100))
    assert "WARNING: no label changes" in line


@pytest.mark.slow
def test_the_printed_form_is_refused_at_the_papers_pull() -> None:
    for overrides, why in (
        (CIFAR10_50, "stays at 0.49"),
        (f"{CLOTHING} stages.pencil.lambda=3000", "oscillates"),
    ):
        with pytest.raises(PencilError, match=f"{why}.*; try stages.pencil.compatibility=released"):
            check_outlook(schedule(f"{overrides} stages.pencil.compatibility=printed"))


def test_labels_that_never_move_are_refused_with_a_lambda_that_moves_them() -> None:
    with pytest.raises(PencilError, match=r"try stages.pencil.lambda=320,"):
        check_outlook(schedule("stages.pencil.lambda=0"))


@pytest.mark.parametrize(
    "overrides", ["stages.pencil.lambda=4000", "stages.pencil.lambda=4000 stages.pencil.epochs=2"]
)
def test_labels_that_change_within_two_visits_are_refused_with_numbers_that_take_longer(
    overrides: str,
) -> None:
    with pytest.raises(PencilError, match=r"a label changes after 1 visit with .*lambda=4000") as refused:
        check_outlook(schedule(overrides))
    tried = re.search(
        r"try (.+?)(?: or .*)?, or set stages.pencil.allow_fast_labels=true", str(refused.value)
    )
    assert tried is not None
    changed = dict(text.split("=") for text in f"{overrides} {tried.group(1)}".split())
    better = check_outlook(schedule(" ".join(f"{key}={value}" for key, value in changed.items())))
    visits = re.search(r"changes after (\d+) of", better)
    assert visits is not None
    assert int(visits.group(1)) >= 3
    forced = "stages.pencil.lambda=4000 stages.pencil.allow_fast_labels=true"
    assert "changes after 1 of 16 visits" in check_outlook(schedule(forced))


@given(st.integers(2, 5000), st.floats(0.9, 0.9999))
def test_a_new_label_has_the_start_confidence(num_classes: int, confidence: float) -> None:
    stage = STAGE.model_copy(update={"start_confidence": confidence})
    start = initial_logits(torch.tensor([0]), num_classes, label_scale(stage, num_classes))
    assert start.double().softmax(-1)[0, 0].item() == pytest.approx(confidence, abs=1e-5)


def test_a_start_confidence_sets_the_scale() -> None:
    stage = schedule("stages.pencil.start_confidence=0.99").stages.pencil
    assert label_scale(stage, 1000) == pytest.approx(11.5, abs=0.01)  # ln(99 * 999)
    with pytest.raises(PencilError, match="not above chance for 10 classes"):
        label_scale(schedule("stages.pencil.start_confidence=0.1").stages.pencil, 10)


def test_the_rate_of_the_last_stage_can_fall_along_a_cosine() -> None:
    stages = schedule(
        f"{CIFAR} stages.finetune.rate=0.2 stages.finetune.schedule=cosine stages.finetune.drop_after=null"
    )
    rates = [stages.stage_at(200 + epoch).learning_rate for epoch in (0, 40, 60, 80, 119)]
    assert rates == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0], abs=1e-3)


def test_mixtures_in_the_first_stage_are_compared_with_given_classes_and_later_with_labels() -> None:
    mixed = f"{CIFAR} stages.backbone.mixup=1.0 stages.pencil.mixup=0.5 stages.pencil.teacher=0.9"
    first, second = (schedule(mixed).stage_at(epoch) for epoch in (0, 70))
    assert (first.mixup, second.mixup) == (1.0, 0.5)
    class_logits, labels = torch.randn(2, 8, 10, generator=torch.Generator().manual_seed(1))
    given_class, own = torch.arange(8), torch.full((8, 1), 0.7)
    log_f, given_alone = class_logits.log_softmax(-1), torch.nn.functional.one_hot(given_class, 10)
    for stage, y in ((first, given_alone), (second, labels.softmax(-1))):
        expected = -((0.7 * y + 0.3 * y.roll(1, 0)) * log_f).sum(-1)
        assert_close(stage.loss(class_logits, labels, given_class, own), expected, atol=0.01, rtol=0)


def test_mixtures_without_a_teacher_are_refused_where_labels_move() -> None:
    with pytest.raises(PencilError, match=r"stages\.pencil: mixup: needs teacher"):
        schedule(f"{CIFAR} stages.pencil.mixup=1.0")
    with pytest.raises(PencilError, match=r"stages\.finetune: mixup: with move_labels it needs average"):
        schedule(f"{CIFAR} stages.finetune.mixup=1.0 stages.finetune.move_labels=true")


def test_rounds_repeat_the_last_two_stages_from_what_was_reached() -> None:
    lengths = "stages.backbone.epochs=2 stages.pencil.epochs=3 stages.finetune.epochs=1"
    stages = schedule(f"{lengths} stages.pencil.rounds=2 stages.finetune.average=0.9")
    found = [stages.stage_at(epoch) for epoch in range(stages.epochs)]
    assert "".join(stage.name[0] for stage in found) == "bbpppfpppf"
    starts = [epoch for epoch in range(stages.epochs) if stages.starts_at(epoch)]
    assert starts == [0, 2, 5, 6, 9]
    assert [stage.from_average for stage in found] == [False] * 6 + [True] * 3 + [False]
    assert len(stages.label_rates()) == 6
    alone = schedule(f"{lengths} stages.pencil.rounds=2 stages.pencil.teacher=0.9")
    assert not any(alone.stage_at(epoch).from_average for epoch in range(alone.epochs))


def test_the_outlook_counts_the_visits_of_all_rounds() -> None:
    few = "stages.pencil.epochs=5 stages.pencil.lambda=400 stages.pencil.tuned_classes=10"
    with pytest.raises(PencilError, match="and labels move in 5 epochs"):
        check_outlook(schedule(few))
    assert "of 15 visits" in check_outlook(schedule(f"{few} stages.pencil.rounds=3"))


def test_labels_move_on_in_the_last_stage_as_at_the_end_of_the_stage_before() -> None:
    lengths = "stages.backbone.epochs=2 stages.pencil.epochs=3 stages.finetune.epochs=4"
    lambdas = "stages.pencil.lambda=[[0,3000],[2,500]] stages.pencil.alpha=0.04"
    stages = schedule(f"{lengths} {lambdas} stages.finetune.move_labels=true")
    before, after = stages.stage_at(4), stages.stage_at(5)
    assert (before.name, after.name) == ("pencil", "finetune")
    fresh = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    labels, given_class = initial_logits(torch.arange(5), 10), torch.arange(5)
    moved = after.move_labels(fresh, labels, given_class)
    assert_close(moved, before.move_labels(fresh, labels, given_class))
    assert not torch.equal(moved, labels)
    rates = stages.label_rates()
    assert len(rates) == 7
    assert rates[2:] == [before.label_rate] * 5


def test_labels_do_not_move_without_a_pencil_stage() -> None:
    stages = schedule("stages.backbone.epochs=1 stages.pencil.epochs=0 stages.finetune.move_labels=true")
    assert not stages.stage_at(1).moves_labels
    assert stages.label_rates() == []


@pytest.mark.parametrize("own", [None, torch.full((5, 1), 0.7)])
def test_a_label_can_be_learned_as_if_it_were_surer(own: torch.Tensor | None) -> None:
    chance = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(5, 10, generator=chance), torch.randn(5, 10, generator=chance).half()
    plain, sharp = (schedule(f"{CIFAR} stages.finetune.sharpen={by}").stage_at(200) for by in (1, 3))
    given_class = torch.zeros(5, dtype=torch.long)
    found = sharp.loss(logits, labels, given_class, own)
    assert_close(found, plain.loss(logits, labels.float() * 3, given_class, own))
    assert not torch.equal(found, plain.loss(logits, labels, given_class, own))


def test_a_last_stage_that_could_not_move_labels_well_is_refused() -> None:
    moving = f"{CIFAR} stages.finetune.move_labels=true"
    with pytest.raises(PencilError, match=r"stages\.finetune: move_labels: not together with restart"):
        schedule(f"{moving} stages.finetune.restart=true")
    falling = schedule(f"{moving} stages.pencil.alpha=0 stages.pencil.lambda=[[0,3000],[129,0]]")
    with pytest.raises(PencilError, match=r"where stages\.pencil\.lambda is 0; let it end above 0"):
        check_outlook(falling)
