"""A step moves the weights by the weighted mean of its samples, and counts where the network agrees."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pencil_scale.config.settings import Optimizer
from pencil_scale.config.stages import Stages
from pencil_scale.labels.owners import Batch
from pencil_scale.method.evidence import TOP, Predictions
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.train.average import Average
from pencil_scale.train.ranks import Ranks, Tally
from pencil_scale.train.step import Stepper, top_predictions

NUM_CLASSES = 4
STAGES = Stages.model_validate(
    {
        "backbone": {"epochs": 1, "rate": 0.1},
        "pencil": {"epochs": 1, "rate": 0.1, "lambda": 400, "tuned_classes": 10},
        "finetune": {"epochs": 1, "rate": 0.1},
    }
)
SCHEDULE = Schedule(STAGES, Optimizer(tuned_batch=8, batch_per_worker=8), NUM_CLASSES, 8)
STAGE = SCHEDULE.stage_at(0)


def batch_of(weights: list[float], seed: int) -> Batch:
    chance, size = torch.Generator().manual_seed(seed), len(weights)
    return Batch(
        rows=torch.arange(size),
        images=torch.randn(size, 3, generator=chance),
        weight=torch.tensor(weights),
        label_logits=torch.randn(size, NUM_CLASSES, generator=chance),
        noisy_class=torch.randint(NUM_CLASSES, (size,), generator=chance),
    )


def joined(*batches: Batch) -> Batch:
    names = ("rows", "images", "weight", "label_logits", "noisy_class")
    return Batch(**{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names})


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, NUM_CLASSES)


def weights_after(model: nn.Module, batches: list[Batch], accumulation: int = 1) -> list[Tensor]:
    """The weights after steps on these batches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stepper = Stepper(model, optimizer, accumulation=accumulation)
    for nth, batch in enumerate(batches):
        stepper.step(batch, STAGE, nth, len(batches))
    return list(model.parameters())


def test_one_worker_moves_by_exactly_the_gradient_of_the_weighted_mean() -> None:
    batch, model = batch_of([1, 0, 1, 1, 1], seed=1), linear()
    loss = STAGE.loss(model(batch.images), batch.label_logits, batch.noisy_class)
    ((loss * batch.weight).sum() / batch.weight.sum()).backward()
    expected = [weight.detach() - 0.5 * weight.grad for weight in model.parameters()]
    for here, there in zip(weights_after(model, [batch]), expected, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("last", [[1.0], [0.0, 1.0, 0.0], [0.0, 0.0]])
def test_accumulated_batches_equal_one_batch_whatever_their_weights(last: list[float]) -> None:
    some = [batch_of([1, 1, 0, 1, 1], seed=1), batch_of(last, seed=2)]
    together = weights_after(linear(), [joined(*some)])
    for here, there in zip(weights_after(linear(), some, accumulation=2), together, strict=True):
        torch.testing.assert_close(here, there)


class Fixed(nn.Module):
    """Predicts the class that the image names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot(images.long(), NUM_CLASSES) * self.scale


def agreement(given: list[int], predicted: list[int], weight: list[float]) -> float:
    model, tally = Fixed(), Tally(Ranks())
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0))
    columns = [torch.tensor(column).split(4) for column in (given, predicted, weight)]
    for noisy_class, images, weights in zip(*columns, strict=True):
        labels = torch.zeros(len(images), NUM_CLASSES)
        tally.add(stepper.step(Batch(images, images, weights, labels, noisy_class), STAGE, 0, 1))
    return tally.close()["balanced_agreement"]


def test_balanced_agreement_is_the_mean_over_classes_that_occur() -> None:
    given, predicted = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 2]
    assert agreement(given, predicted, [1.0] * 6) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert agreement(given, predicted, [1.0] * 5 + [0.0]) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_a_network_that_always_says_the_most_frequent_class_agrees_no_more_than_by_chance() -> None:
    given = [0] * 97 + [1, 2, 3]
    assert agreement(given, [0] * 100, [1.0] * 100) == pytest.approx(1 / NUM_CLASSES)


@pytest.mark.parametrize("num_classes", [2, 4, 9])
def test_a_prediction_is_the_top_of_the_softmax(num_classes: int) -> None:
    class_logits = 5 * torch.randn(50, num_classes, generator=torch.Generator().manual_seed(1))
    expected = Predictions.from_logits(class_logits.numpy())
    found = top_predictions(class_logits)
    top = min(TOP, num_classes)
    assert found.dtype == torch.float32
    assert found[:, :top].tolist() == expected.classes.tolist()
    assert torch.allclose(found[:, top:].double(), torch.from_numpy(expected.log_p), atol=1e-5)


def test_an_impossible_class_has_a_log_probability_of_16_bits() -> None:
    found = top_predictions(torch.tensor([[1e5, 0.0, -1e5]]))
    assert found.half().isfinite().all()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_predicts_what_the_network_said_and_nothing_of_an_unreadable_image(bf16: bool) -> None:
    batch, model = batch_of([1, 0, 1], seed=1), linear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        class_logits = model(batch.images)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), bf16)
    found = stepper.step(batch, STAGE, 0, 1).predicted
    assert torch.equal(found[[0, 2]], top_predictions(class_logits)[[0, 2]])
    assert found[1].isnan().all()


def test_an_average_follows_the_network_and_moves_the_labels_in_its_place() -> None:
    batch, model = batch_of([1, 1, 1, 1], seed=1), linear()
    average = Average(model)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), average=average)
    taught, alone = Stage("pencil", 0.1, label_rate=1.0, decay=0.9), Stage("pencil", 0.1, label_rate=1.0)
    stepper.start(taught)
    before = [weight.clone() for weight in model.parameters()]
    stepper.step(batch, taught, 0, 2)
    for was, now, mean in zip(before, model.parameters(), average.network.parameters(), strict=True):
        torch.testing.assert_close(mean, 0.1 * was + 0.9 * now)  # the first step counts most
        assert not torch.equal(was, now)
    with torch.no_grad():
        predicted = average.network(batch.images)
    found = stepper.step(batch, taught, 1, 2)
    assert torch.equal(found.predicted, top_predictions(predicted))
    expected = alone.move_labels(predicted, batch.label_logits, batch.noisy_class)
    assert torch.equal(found.label_logits, expected)


@pytest.mark.parametrize(("steps", "followed"), [(0, 0.9), (1, 9 / 11), (17, 1 / 3), (80, 0.1), (500, 0.1)])
def test_an_average_follows_faster_at_first_and_again_after_a_restart(steps: int, followed: float) -> None:
    model = nn.Linear(1, 1)
    average = Average(model)
    for _ in range(2):
        for _ in range(steps):
            average.follow(0.9)
        before = float(average.network.get_parameter("weight"))
        with torch.no_grad():
            model.weight += 1.0
        average.follow(0.9)
        assert float(average.network.get_parameter("weight")) - before == pytest.approx(followed, abs=1e-5)
        average.restart()


def test_a_stage_starts_from_new_weights_or_from_the_average_and_without_momentum() -> None:
    batch, model = batch_of([1, 1, 1, 1], seed=1), linear()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), linear(seed=9).state_dict()
    stepper = Stepper(model, optimizer, average=Average(model), fresh=fresh)
    for nth in range(3):
        stepper.step(batch, Stage("finetune", 0.1, decay=0.5), nth, 3)
    assert stepper.average is not None
    mean = [weight.clone() for weight in stepper.average.network.parameters()]
    stepper.start(Stage("pencil", 0.1, from_average=True))
    assert all(map(torch.equal, model.parameters(), mean))
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
    stepper.start(Stage("finetune", 0.1, restarts=True))
    assert all(torch.equal(weight, fresh[name]) for name, weight in model.named_parameters())
    assert all(map(torch.equal, stepper.average.network.parameters(), model.parameters()))


def test_a_mixture_is_compared_with_both_labels_and_predicts_no_sample() -> None:
    batch, model, own = batch_of([1, 1, 1], seed=1), linear(), torch.tensor([[0.7], [0.7], [1.0]])
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        log_f = model(batch.images).log_softmax(-1)
    y = batch.label_logits.softmax(-1)
    loss = -(own * y * log_f + (1 - own) * y.roll(1, 0) * log_f).sum(-1)
    found = stepper.step(replace(batch, own=own), Stage("finetune", 0.1), 0, 1)
    assert found.sums[0].item() == pytest.approx(loss.sum().item())
    assert found.predicted.isnan().all()  # so what was predicted for the sample itself is kept


def test_a_teacher_that_sees_the_images_unmixed_moves_their_labels() -> None:
    batch, model, own = batch_of([1, 1, 1], seed=1), linear(), torch.full((3, 1), 0.7)
    mixed = replace(batch, images=torch.lerp(batch.images.roll(1, 0), batch.images, 0.7), own=own)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), average=Average(model))
    taught = Stage("pencil", 0.1, label_rate=1.0, decay=0.9, mixup=1.0)
    with torch.no_grad():
        predicted = model(batch.images)
    found = stepper.step(replace(mixed, weak_images=batch.images), taught, 0, 1)
    assert torch.equal(found.predicted, top_predictions(predicted))
    expected = taught.move_labels(predicted, batch.label_logits, batch.noisy_class)
    assert torch.equal(found.label_logits, expected)


def test_an_average_predicts_the_images_of_mixtures_where_labels_are_fixed() -> None:
    batch, model, own = batch_of([1, 1, 1], seed=1), linear(), torch.full((3, 1), 0.7)
    mixed = replace(batch, images=torch.lerp(batch.images.roll(1, 0), batch.images, 0.7), own=own)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), average=Average(model))
    with torch.no_grad():
        predicted = model(batch.images)
    fixed = Stage("finetune", 0.1, decay=0.9, mixup=1.0)
    found = stepper.step(replace(mixed, weak_images=batch.images), fixed, 0, 1)
    assert torch.equal(found.predicted, top_predictions(predicted))
    assert torch.equal(found.label_logits, batch.label_logits)
