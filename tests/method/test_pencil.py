"""The losses and the label step, compared with formulas in plain Python, autograd and the paper."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from pencil_scale.method.pencil import (
    Form,
    classification_loss,
    compatibility_loss,
    entropy_loss,
    initial_logits,
    label_outlook,
    move_labels,
    pencil_loss,
)

FORMS: list[Form] = ["released", "printed"]
CLASS_COUNTS = [10, 14, 100, 400, 1000]


def some_logits(num_samples: int = 6, num_classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    class_logits = torch.randn(num_samples, num_classes, generator=random) * 3
    label_logits = torch.randn(num_samples, num_classes, generator=random) * 3
    noisy_class = torch.randint(num_classes, (num_samples,), generator=random)
    return class_logits, label_logits, noisy_class


def by_hand(logits: list[float]) -> list[float]:
    """Softmax in plain Python, float64."""
    top = max(logits)
    powers = [math.exp(value - top) for value in logits]
    return [power / sum(powers) for power in powers]


# --- the losses --------------------------------------------------------------------------------------


def test_the_losses_are_the_formulas_of_the_paper() -> None:
    class_logits, label_logits, noisy_class = some_logits()
    for f_logits, y_logits, k, classify, printed, released, entropy in zip(
        class_logits.tolist(),
        label_logits.tolist(),
        noisy_class.tolist(),
        classification_loss(class_logits, label_logits).tolist(),
        compatibility_loss(label_logits, noisy_class, "printed").tolist(),
        compatibility_loss(label_logits, noisy_class, "released").tolist(),
        entropy_loss(class_logits).tolist(),
        strict=True,
    ):
        f, y = by_hand(f_logits), by_hand(y_logits)
        assert classify == pytest.approx(
            sum(a * math.log(a / b) for a, b in zip(f, y, strict=True)) / 10, rel=1e-5
        )
        assert printed == pytest.approx(-math.log(y[k]), rel=1e-5)
        assert released == pytest.approx(-math.log(by_hand(y)[k]), rel=1e-5)
        assert entropy == pytest.approx(-sum(a * math.log(a) for a in f) / 10, rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_pencil_loss_is_the_weighted_sum(form: Form) -> None:
    class_logits, label_logits, noisy_class = some_logits()
    expected = (
        classification_loss(class_logits, label_logits)
        + 0.1 * compatibility_loss(label_logits, noisy_class, form)
        + 0.4 * entropy_loss(class_logits)
    )
    assert_close(pencil_loss(class_logits, label_logits, noisy_class, 0.1, 0.4, form), expected)


def test_the_gradients_of_a_label_are_those_derived_by_hand() -> None:
    class_logits, label_logits, noisy_class = (tensor.double() for tensor in some_logits())
    label_logits.requires_grad_()
    f, y = class_logits.softmax(-1), label_logits.detach().softmax(-1)
    given_class = torch.nn.functional.one_hot(noisy_class.long(), 10).double()
    [of_classification] = torch.autograd.grad(
        classification_loss(class_logits, label_logits).sum(), label_logits
    )
    [of_printed] = torch.autograd.grad(
        compatibility_loss(label_logits, noisy_class, "printed").sum(), label_logits
    )
    assert_close(of_classification, (y - f) / 10)
    assert_close(of_printed, y - given_class)


@pytest.mark.parametrize("form", FORMS)
def test_autograd_agrees_with_finite_differences(form: Form) -> None:
    class_logits, label_logits, noisy_class = some_logits(num_samples=3, num_classes=5)
    inputs = (class_logits.double().requires_grad_(), label_logits.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda f, y: pencil_loss(f, y, noisy_class, 0.1, 0.4, form), inputs)


def test_a_label_that_agrees_with_the_network_costs_nothing() -> None:
    class_logits, _, _ = some_logits()
    assert_close(classification_loss(class_logits, class_logits + 3), torch.zeros(6))


def test_losses_are_float32_under_half_precision() -> None:
    class_logits, label_logits, noisy_class = some_logits()
    for dtype in (torch.bfloat16, torch.float16):
        loss = pencil_loss(class_logits.to(dtype), label_logits, noisy_class, 0.1, 0.4)
        exact = pencil_loss(class_logits.to(dtype).float(), label_logits, noisy_class, 0.1, 0.4)
        assert loss.dtype == torch.float32
        assert_close(loss, exact)


EXTREME = st.sampled_from([-1e4, -30.0, 0.0, 1e-30, 30.0, 1e4])


@settings(max_examples=200)
@given(
    st.lists(EXTREME, min_size=4, max_size=4),
    st.lists(EXTREME, min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from(FORMS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nothing_is_ever_infinite(
    f: list[float], y: list[float], k: int, form: Form, dtype: torch.dtype
) -> None:
    class_logits = torch.tensor([f]).to(dtype).requires_grad_()
    label_logits = torch.tensor([y], requires_grad=True)
    noisy_class = torch.tensor([k])
    loss = pencil_loss(class_logits, label_logits, noisy_class, 0.1, 0.4, form)
    loss.sum().backward()
    moved = move_labels(class_logits, label_logits.detach(), noisy_class, 6.7, 1.12, form)
    assert class_logits.grad is not None
    assert label_logits.grad is not None
    for tensor in (loss, class_logits.grad, label_logits.grad, moved):
        assert torch.isfinite(tensor).all()


def test_a_label_that_is_one_hot_to_the_last_bit_can_still_move() -> None:
    label_logits = initial_logits(torch.tensor([0]), 10, scale=200.0)
    assert label_logits.softmax(-1)[0, 0] == 1
    class_logits = initial_logits(torch.tensor([1]), 10)
    moved = move_labels(class_logits, label_logits, torch.tensor([0]), label_rate=1.0, pull=1.0)
    assert moved[0, 0] < label_logits[0, 0]
    assert moved[0, 1] > label_logits[0, 1]


def test_a_misspelt_form_is_refused_by_the_loss_and_by_the_step() -> None:
    class_logits, label_logits, noisy_class = some_logits()
    with pytest.raises(ValueError, match="form 'relased'"):
        compatibility_loss(label_logits, noisy_class, "relased")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="form 'relased'"):
        move_labels(class_logits, label_logits, noisy_class, 1.0, 1.0, "relased")  # type: ignore[arg-type]


# --- where a label starts ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "share"), [(10, 0.9996), (100, 0.9955), (1000, 0.957)])
def test_the_start_at_scale_ten_weakens_with_the_number_of_classes(num_classes: int, share: float) -> None:
    start = initial_logits(torch.tensor([3]), num_classes)
    assert start.softmax(-1)[0, 3].item() == pytest.approx(share, abs=1e-4 if share > 0.99 else 1e-3)


# --- the step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_the_step_is_autograd_of_the_batch_mean_times_lambda(form: Form, num_classes: int) -> None:
    alpha, beta, lambda_, batch = 0.08, 0.8, 3000.0, 32
    class_logits, label_logits, noisy_class = some_logits(batch, num_classes)
    class_logits, label_logits = class_logits.double(), label_logits.double().requires_grad_()
    pencil_loss(class_logits, label_logits, noisy_class, alpha, beta, form).mean().backward()
    assert label_logits.grad is not None
    expected = label_logits.detach() - lambda_ * label_logits.grad
    rate, pull = lambda_ / (batch * num_classes), alpha * num_classes
    moved = move_labels(class_logits, label_logits.detach(), noisy_class, rate, pull, form)
    assert_close(moved, expected)
    single = move_labels(class_logits.float(), label_logits.detach().float(), noisy_class, rate, pull, form)
    assert single.dtype == torch.float32
    assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from(FORMS), st.integers(0, 1000))
def test_a_label_moves_equally_far_alone_or_in_a_batch(split: list[int], form: Form, seed: int) -> None:
    class_logits, label_logits, noisy_class = some_logits(sum(split), 10, seed)
    together = move_labels(class_logits, label_logits, noisy_class, 0.94, 1.0, form)
    batches = zip(class_logits.split(split), label_logits.split(split), noisy_class.split(split), strict=True)
    apart = torch.cat([move_labels(f, y, k, 0.94, 1.0, form) for f, y, k in batches])
    assert torch.equal(together, apart)


@given(st.integers(0, 1000), st.sampled_from(FORMS), st.floats(0, 10), st.floats(0, 10))
def test_a_step_only_shifts_weight_between_classes(seed: int, form: Form, rate: float, pull: float) -> None:
    class_logits, label_logits, noisy_class = some_logits(seed=seed)
    step = move_labels(class_logits, label_logits, noisy_class, rate, pull, form) - label_logits
    assert_close(step.sum(-1), torch.zeros(6), atol=1e-3, rtol=0)


def test_no_gradient_flows_from_the_step_into_the_network() -> None:
    class_logits, label_logits, noisy_class = some_logits()
    moved = move_labels(class_logits.requires_grad_(), label_logits, noisy_class, 1.0, 1.0)
    assert not moved.requires_grad


# --- where a label ends: the facts behind the defaults -----------------------------------------------


def settled_label(pull: float, rate: float, form: Form, num_classes: int = 10, visits: int = 5000) -> Tensor:
    noisy_class = torch.tensor([0])
    belief = torch.full((1, num_classes), 0.01 / (num_classes - 1)).index_fill_(1, torch.tensor([1]), 0.99)
    label_logits = initial_logits(noisy_class, num_classes)
    for _ in range(visits):
        label_logits = move_labels(belief.log(), label_logits, noisy_class, rate, pull, form)
    return label_logits.softmax(-1)[0]


def test_the_printed_form_settles_between_the_network_and_the_given_class() -> None:
    y = settled_label(pull=1.0, rate=0.3125, form="printed")  # alpha 0.1, 10 classes, lambda 400, batch 128
    assert y[0].item() == pytest.approx((0.01 / 9 + 1.0) / 2, abs=1e-2)  # (f + pull * onehot) / (1 + pull)
    assert y[1].item() == pytest.approx(0.99 / 2, abs=1e-2)


def test_the_printed_form_changes_no_label_at_small_steps() -> None:
    outlook = label_outlook(10, 1.0, [0.3125], form="printed")
    assert (outlook.changes, outlook.visits, outlook.swings) == (False, None, False)


def test_the_printed_form_oscillates_at_the_steps_of_clothing1m() -> None:
    outlook = label_outlook(14, 0.08 * 14, [3000 / 32 / 14], form="printed")
    assert (outlook.changes, outlook.swings) == (False, True)


def test_the_printed_form_can_change_labels_when_its_pull_is_well_under_one() -> None:
    assert label_outlook(10, 0.5, [0.3125], form="printed").changes


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", CLASS_COUNTS)
def test_the_released_form_corrects_below_a_pull_of_two_and_not_above(num_classes: int) -> None:
    for pull in (0.0, 1.0, 1.12, 1.9):
        assert label_outlook(num_classes, pull, [0.5]).changes, pull
    for pull in (2.1, 3.0, 10.0):
        assert not label_outlook(num_classes, pull, [0.5]).changes, pull


@pytest.mark.slow
@pytest.mark.parametrize(("pull", "share"), [(1.0, 0.88), (1.12, 0.81), (1.9, 0.52), (3.0, 0.34)])
def test_the_share_a_new_class_ends_with(pull: float, share: float) -> None:
    assert label_outlook(10, pull, [0.5]).share == pytest.approx(share, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.16, 0.94])
@pytest.mark.parametrize("num_classes", [10, 1000])
def test_a_label_changes_after_about_six_over_the_rate(num_classes: int, rate: float) -> None:
    visits = label_outlook(num_classes, 1.0, [rate]).visits
    assert visits == pytest.approx(6 / rate, rel=0.4)


def test_the_papers_cifar100_settings_change_no_label() -> None:
    assert not label_outlook(100, 0.1 * 100, [10000 / 128 / 100]).changes


@pytest.mark.slow
def test_clothing1ms_alpha_repairs_nothing_with_four_hundred_classes() -> None:
    assert not label_outlook(400, 0.08 * 400, [3000 / 32 / 400]).changes


def test_a_rate_that_falls_to_zero_is_followed_visit_by_visit() -> None:
    falling = [3000 * (1 - visit / 129) / 128 / 10 for visit in range(130)]
    assert label_outlook(10, 0.0, falling).visits == 3
    assert not label_outlook(
        10, 0.0, [0.5, 0.5, 0.0]
    ).changes  # 2 visits are too few, and then it stops moving


def test_labels_that_never_move_never_change() -> None:
    assert not label_outlook(10, 1.0, [0.0]).changes
