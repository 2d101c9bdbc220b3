"""A replayed step does what a plain one does."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Optimizer
from pencil_scale.config.stages import Stages
from pencil_scale.labels.owners import Batch
from pencil_scale.method.backbones import build_backbone
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.average import Average
from pencil_scale.train.step import StepGraph, Stepper

STAGES = Stages.model_validate(
    {
        "backbone": {"epochs": 1, "rate": 0.04},
        "pencil": {
            "epochs": 2,
            "rate": 0.04,
            "alpha": 0.1,
            "lambda": [[0, 400], [1, 200]],
            "tuned_classes": 10,
        },
        "finetune": {"epochs": 1, "rate": 0.2},
    }
)
SIZES = [32] * 7 + [20]  # the last batch of an epoch is rarely full


def batches(device: str) -> list[Batch]:
    chance = torch.Generator().manual_seed(1)
    return [
        Batch(
            rows=torch.arange(size),
            images=torch.randn(size, 3, 32, 32, generator=chance).to(device),
            weight=torch.ones(size, device=device),
            label_logits=torch.randn(size, 10, generator=chance).to(device),
            noisy_class=torch.randint(10, (size,), generator=chance).to(device),
        )
        for size in SIZES
    ]


def train(stepper: Stepper | StepGraph, stages: list[Stage]) -> list[Tensor]:
    """The labels and predictions of an epoch of each stage, with a rate that changes at every step."""
    moved = []
    for stage in stages:
        stepper.start(stage)
        for nth, batch in enumerate(batches("cuda")):
            if stage.mixup:
                own = torch.full((len(batch.rows), 1), 1 - 0.5 / (2 + nth)).cuda()
                unmixed = batch.images.flip(-1) if stage.decay else None
                batch = replace(batch, own=own, weak_images=unmixed)
            for group in stepper.optimizer.param_groups:
                group["lr"] = stage.learning_rate / (1 + nth)
            result = stepper.step(batch, stage, nth, len(SIZES))
            moved.append(torch.cat([result.label_logits, result.predicted], dim=1))
    return moved


def stepper_of(model: nn.Module, bf16: bool) -> Stepper:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
    return Stepper(model, optimizer, bf16, average=Average(model))


@pytest.fixture
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"teacher": 0.9, "mixup": 1.0},
        {"average": 0.9, "mixup": 1.0},
        {"average": 0.9, "mixup": 1.0, "move_labels": True, "sharpen": 3.0},
    ],
)
def test_weights_and_labels_end_where_plain_steps_bring_them(
    repeatable: None, bf16: bool, more: dict[str, float]
) -> None:
    torch.manual_seed(1)
    changed = "pencil" if "teacher" in more else "finetune"
    options = {changed: getattr(STAGES, changed).model_copy(update=more)}
    optimizer = Optimizer(tuned_batch=32, batch_per_worker=32)
    schedule = Schedule(STAGES.model_copy(update=options), optimizer, 10, 32)
    stages = [schedule.stage_at(epoch) for epoch in range(4)]
    plain = stepper_of(build_backbone("preact_resnet32", 10).cuda(), bf16)
    other = stepper_of(copy.deepcopy(plain.model), bf16)
    expected = train(plain, stages)
    found = train(StepGraph(other, odd=replace(other), full_batch=32), stages)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    averages = [stepper.average.network.state_dict() for stepper in (other, plain) if stepper.average]
    torch.testing.assert_close(*averages, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other.model.state_dict(), plain.model.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "override",
    ["workers.gpu=false", "workers.count=2", "optimizer.accumulation=2", "optimizer.compile=reduce-overhead"],
)
def test_what_cannot_be_recorded_is_refused(override: str) -> None:
    overrides = ["workers.gpu=true", "optimizer.cuda_graph=true", override]
    with pytest.raises(PencilError, match="cuda_graph"):
        load_config("configs/cifar10.yaml", overrides)
