"""Automatic settings: a value for every key of the network, its images and its training that a config omits.

They are chosen once, when a run starts, from the catalogue and the workers, and stored with the run. Explicit
values win.

    chosen = choose(config, Facts(num_samples=5000, num_classes=10, sizes={"28x28": 5000}))
    chosen["stages.backbone.epochs"]             # 16
    config = filled(config, chosen)

The numbers come from trials on Fashion-MNIST and CIFAR-10 with 30 % of the labels wrong. A network needs a
few thousand steps before labels may move, but with many passes over few samples it memorises their noise. So
epochs follow from a budget of steps, within bounds; small datasets get small batches, and rates follow the
batch. A label that the network contradicts for good changes at about half of the pencil stage.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pencil_scale.config.settings import Config, Images
from pencil_scale.config.values import Settings, read_curve
from pencil_scale.storage.errors import PencilError

# Steps of a stage, and the fewest and most epochs to take them in.
FROM_SCRATCH = {"backbone": (2500, 5, 25), "pencil": (4000, 8, 40), "finetune": (2000, 4, 20)}
PRETRAINED = {"backbone": (1000, 3, 10), "pencil": (2000, 8, 25), "finetune": (1000, 4, 10)}
HEAD = {"backbone": (300, 2, 4), "pencil": (1500, 10, 20), "finetune": (600, 2, 8)}
RATE, PRETRAINED_RATE, HIGHEST_RATE = 0.05 / 128, 0.0016 / 32, 0.1  # per sample of a batch; per batch
HEAD_RATE, HIGHEST_HEAD_RATE = 0.001 / 16, 0.03
HEAD_DECAY = (0.1, 100)  # of weights, at most; divided by the samples
MLP_RATE, MLP_DECAY = 3.0, 0.3  # of a head with a hidden layer, by which those of a linear one are multiplied
STEPS_PER_EPOCH = 160
SMALLEST_BATCH, LARGEST_BATCH, LARGEST_OF_HEAD, FEWEST_PER_WORKER = 16, 2048, 4096, 8
FOLDS, MOST_FOLDED = 4, 10_000  # trainings, and the samples up to which there are that many
TUNED_CLASSES = 10  # of the trials; the losses are rescaled to the class count of the data
TRAVEL = 12.0  # of a label's logits over the pencil stage, at pull 1
FEWEST_VISITS = 3  # before a label may change
TINY, SMALL = 12, 128  # sides up to which small_convnet, and a network without strides, suit an image

Take = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Facts:
    """What the choices depend on, from the catalogue."""

    num_samples: int
    num_classes: int
    sizes: Mapping[str, int]  # of the images, as in {"28x28": 5000}; not necessarily all
    continues: bool = False  # the run continues another, whose network has seen the samples


def choose(config: Config, facts: Facts) -> dict[str, Any]:
    """Choose a value for every key that the config leaves open: dotted keys, and values for JSON."""
    chosen: dict[str, Any] = {}
    take = _taker(config, chosen)
    is_large = config.workers.gpu or config.model.head is not None
    crop = _choose_images(config, facts, take, 256 if is_large else 146)
    _choose_backbone(config, crop, take)
    _choose_training(config, facts, crop, take)
    if config.evidence.watched is None:
        take("evidence.folds", 1 if facts.continues or facts.num_samples > MOST_FOLDED else FOLDS)
    return chosen


def images_for_features(config: Config, facts: Facts) -> Images:
    """Choose image settings for a frozen network: it sees every image once, so photos may be larger."""
    chosen: dict[str, Any] = {}
    _choose_images(config, facts, _taker(config, chosen), 256)
    return filled(config, chosen).images


def _taker(config: Config, chosen: dict[str, Any]) -> Take:
    """A function that gives the value of a key, and adds one to `chosen` if the config leaves it open."""

    def take(dotted: str, value: Any) -> Any:
        found = _value(config, dotted)
        if found is None:
            found = chosen[dotted] = value
        return found

    return take


def filled(config: Config, chosen: Mapping[str, Any]) -> Config:
    """Fill in what the config leaves open; what it says stays."""
    for dotted, value in chosen.items():
        if _value(config, dotted) is None:
            config = _with(config, dotted.split("."), value)
    return config


def _value(config: Config, dotted: str) -> Any:
    found: Any = config
    for name in dotted.split("."):
        found = getattr(found, _attribute(name))
    return found


def _with(section: Any, path: list[str], value: Any) -> Any:
    name = _attribute(path[0])
    if isinstance(inner := getattr(section, name), Settings):
        value = _with(inner, path[1:], value)
    elif name == "lambda_":
        value = read_curve(value)
    return section.model_copy(update={name: tuple(value) if isinstance(value, list) else value})


def _attribute(name: str) -> str:
    return "lambda_" if name == "lambda" else name


# --- images and network ------------------------------------------------------------------------------


def common_size(sizes: Mapping[str, int]) -> tuple[int, int]:
    """The width and height that most images have."""
    width, height = max(sizes, key=lambda size: sizes[size]).split("x")
    return int(width), int(height)


def _choose_images(config: Config, facts: Facts, take: Take, photo_side: int) -> int:
    """Crop images of one small size as they are, with a border; scale all others to one size."""
    images = config.images
    if images.crop is not None:
        return images.crop
    side = min(common_size(facts.sizes)) if facts.sizes else 0
    is_small = len(facts.sizes) == 1 and side <= SMALL and images.decode == "cpu"
    if is_small and images.resize is None:
        take("images.pad", max(1, side // 8))
        return int(take("images.crop", side))
    resize = take("images.resize", photo_side)
    return int(take("images.crop", max(1, resize * 7 // 8)))


def _choose_backbone(config: Config, crop: int, take: Take) -> None:
    weights, gpu = config.model.weights, config.workers.gpu
    if weights not in (None, "imagenet") and config.model.backbone is None:
        raise PencilError(
            f"model.backbone: not set, so it is unknown which network {weights} is for; name it, as in "
            "model.backbone=resnet50"
        )
    if weights is not None:
        name = "resnet50" if gpu else "resnet18"
    elif crop <= TINY:
        name = "small_convnet"
    elif crop <= SMALL:
        name = "preact_resnet32" if gpu and crop <= SMALL // 2 else "pooled_convnet"
    else:
        name = "resnet18"
    take("model.backbone", name)


# --- training ----------------------------------------------------------------------------------------


def _choose_training(config: Config, facts: Facts, crop: int, take: Take) -> None:
    parallel = config.workers.count[1] * config.optimizer.accumulation
    wanted = config.optimizer.tuned_batch or _batch(config, facts.num_samples, crop)
    per_worker = max(FEWEST_PER_WORKER, math.ceil(wanted / parallel))
    actual = take("optimizer.batch_per_worker", per_worker) * parallel
    batch = take("optimizer.tuned_batch", actual)
    budgets, rate, weight_decay = FROM_SCRATCH, min(RATE * batch, HIGHEST_RATE), 5e-4
    if config.model.head is not None:
        (most, for_all), is_mlp = HEAD_DECAY, config.model.head == "mlp"
        decay = min(most, for_all / max(facts.num_samples, 1)) * (MLP_DECAY if is_mlp else 1)
        budgets, weight_decay = HEAD, float(f"{decay:.2g}")
        rate = min(HEAD_RATE * batch * (MLP_RATE if is_mlp else 1), HIGHEST_HEAD_RATE)
    elif config.model.weights is not None:
        budgets, rate, weight_decay = PRETRAINED, min(PRETRAINED_RATE * batch, HIGHEST_RATE), 1e-4
    take("optimizer.weight_decay", weight_decay)
    if facts.continues and config.stages.pencil.epochs == 0:  # then this stage alone has to train
        budgets = budgets | {"finetune": budgets["pencil"]}
    steps = math.ceil(max(facts.num_samples, 1) / actual)
    rate = float(f"{rate:.2g}")
    epochs = {}
    for name, (budget, fewest, most) in budgets.items():
        epochs[name] = take(f"stages.{name}.epochs", min(max(round(budget / steps), fewest), most))
        take(f"stages.{name}.rate", rate)
    if config.stages.finetune.schedule == "steps":
        half = epochs["finetune"] // 2
        take("stages.finetune.drop_after", [half] if half else [])
    classes = take("stages.pencil.tuned_classes", TUNED_CLASSES)
    take("stages.pencil.alpha", float(f"{1 / classes:.3g}"))
    # A stage of a few epochs keeps the rate at which a label changes at its third visit.
    label_rate = TRAVEL / max(epochs["pencil"], 2 * FEWEST_VISITS)
    take("stages.pencil.lambda", float(f"{label_rate * batch * classes:.3g}"))


def _batch(config: Config, num_samples: int, crop: int) -> int:
    """A power of two that gives about 160 steps per epoch, within what a worker's memory holds."""
    gpu, count = config.workers.gpu, config.workers.count[1]
    most = count * (128 if crop <= SMALL else 64 if gpu else 32)
    most = LARGEST_OF_HEAD if config.model.head else min(most, LARGEST_BATCH)
    batch = 2 ** round(math.log2(max(num_samples, 1) / STEPS_PER_EPOCH))
    return int(min(max(batch, SMALLEST_BATCH), most))
