"""Numbers that a config leaves open: enough steps, not too many passes, and labels that change in time."""

import re
from pathlib import Path

import pytest

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.config.values import Steps
from pencil_scale.method.automatic import Facts, choose, filled
from pencil_scale.method.outlook import check_outlook
from pencil_scale.method.schedule import Schedule
from pencil_scale.storage.errors import PencilError

BOUNDS = {"backbone": (5, 25), "pencil": (8, 40), "finetune": (4, 20)}
TINY = {"28x28": 1000}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "bare.yaml"
    path.write_text("run: {name: mine, storage: runs/mine}\ndata: {shards: a.tar, classes: c.txt}\n")
    return path


def complete(path: Path, num_samples: int, *overrides: str, num_classes: int = 10) -> Config:
    config = load_config(path, overrides)
    return filled(config, choose(config, Facts(num_samples, num_classes, TINY)))


def batch_of(config: Config) -> int:
    options = config.optimizer
    return options.batch_per_worker * options.accumulation * config.workers.count[1]


@pytest.mark.parametrize("num_samples", [0, 1, 300, 2000, 5000, 20_000, 60_000, 1_000_000])
def test_epochs_stay_within_bounds_and_small_sets_still_get_thousands_of_steps(
    bare: Path, num_samples: int
) -> None:
    config = complete(bare, num_samples)
    for name, stage in config.stages:
        fewest, most = BOUNDS[name]
        assert fewest <= stage.epochs <= most
    if num_samples >= 2000:
        steps = num_samples / batch_of(config)
        assert config.stages.backbone.epochs * steps >= 2000
        assert config.stages.pencil.epochs * steps >= 3500


def test_twenty_thousand_samples_get_the_numbers_of_the_trials(bare: Path) -> None:
    config = complete(bare, 20_000)
    assert (batch_of(config), config.stages.backbone.rate) == (128, 0.05)
    assert [stage.epochs for _, stage in config.stages] == [16, 25, 13]
    assert config.stages.finetune.drop_after == (6,)
    assert config.model.backbone == "pooled_convnet"


def test_epochs_at_which_the_rate_drops_are_chosen_only_if_it_drops(bare: Path) -> None:
    config = complete(bare, 20_000, "stages.finetune.schedule=cosine")
    assert config.stages.finetune.drop_after is None


def test_a_small_set_gets_a_smaller_batch_and_a_lower_rate(bare: Path) -> None:
    config = complete(bare, 2000)
    assert (batch_of(config), config.stages.backbone.rate) == (16, 0.0063)


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
@pytest.mark.parametrize("num_samples", [2000, 1_000_000])
def test_a_label_changes_at_about_half_of_the_stage(bare: Path, num_samples: int, num_classes: int) -> None:
    config = complete(bare, num_samples, num_classes=num_classes)
    line = check_outlook(Schedule(config.stages, config.optimizer, num_classes, batch_of(config)))
    visits = re.search(r"after (\d+) of (\d+) visits", line)
    assert visits is not None
    assert 0.45 < int(visits.group(1)) / int(visits.group(2)) < 0.65


def test_small_datasets_are_trained_on_four_times_unless_evidence_is_set_or_a_night_continues(
    bare: Path,
) -> None:
    assert [complete(bare, num).evidence.folds for num in (300, 10_000, 10_001)] == [4, 4, 1]
    assert complete(bare, 300, "evidence.folds=2").evidence.folds == 2
    for overrides in (["evidence.watched=0.1"], ["evidence.watched=0"]):
        assert complete(bare, 300, *overrides).evidence.folds is None
    assert choose(load_config(bare), Facts(300, 10, TINY, continues=True))["evidence.folds"] == 1
    with pytest.raises(
        PencilError, match=r"each of 4 trainings watches 1/4 of the samples; leave watched out"
    ):
        load_config(bare, ["evidence.watched=0.1", "evidence.folds=4"])


def test_what_the_config_says_wins(bare: Path) -> None:
    said = ["stages.pencil.lambda=77", "stages.backbone.epochs=3", "optimizer.weight_decay=0", "images.pad=0"]
    config = complete(bare, 5000, *said)
    assert config.stages.pencil.lambda_ == Steps(((0, 77.0),))
    assert (config.stages.backbone.epochs, config.optimizer.weight_decay, config.images.pad) == (3, 0.0, 0)
    assert config.stages.pencil.epochs == 25


def test_a_config_that_says_everything_is_left_alone() -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "cifar10.yaml")
    assert choose(config, Facts(45_000, 10, {"32x32": 45_000})) == {}


def test_other_workers_keep_the_global_batch(bare: Path) -> None:
    for count in (1, 2, 4):
        config = complete(bare, 20_000, f"workers.count={count}", "optimizer.tuned_batch=128")
        assert batch_of(config) == 128


def test_rates_follow_a_batch_that_the_config_sets(bare: Path) -> None:
    config = complete(bare, 20_000, "optimizer.batch_per_worker=64")
    assert (config.optimizer.tuned_batch, config.stages.backbone.rate) == (64, 0.025)


@pytest.mark.parametrize(
    ("sizes", "gpu", "images"),
    [
        ({"28x28": 9}, False, (None, 28, 3)),
        ({"40x30": 9}, False, (None, 30, 3)),
        ({"28x28": 9, "30x28": 1}, False, (146, 127, None)),
        ({"640x480": 9}, True, (256, 224, None)),
        ({}, True, (256, 224, None)),
    ],
)
def test_images_of_one_small_size_are_not_scaled(
    bare: Path, sizes: dict[str, int], gpu: bool, images: tuple[int | None, int, int | None]
) -> None:
    config = load_config(bare, [f"workers.gpu={str(gpu).lower()}"])
    found = filled(config, choose(config, Facts(1000, 10, sizes))).images
    assert (found.resize, found.crop, found.pad) == images


@pytest.mark.parametrize(
    ("overrides", "backbone"),
    [
        (["images.crop=8"], "small_convnet"),
        (["images.crop=32", "workers.gpu=true"], "preact_resnet32"),
        (["images.crop=224"], "resnet18"),
        (["images.crop=224", "model.weights=imagenet"], "resnet18"),
        (["images.crop=224", "model.weights=imagenet", "workers.gpu=true"], "resnet50"),
    ],
)
def test_the_network_suits_the_images(bare: Path, overrides: list[str], backbone: str) -> None:
    assert complete(bare, 5000, *overrides).model.backbone == backbone


def test_weights_from_a_file_need_the_name_of_their_network(bare: Path) -> None:
    with pytest.raises(PencilError, match=r"model.backbone: not set, so it is unknown which network mine.pt"):
        complete(bare, 5000, "model.weights=mine.pt")


def test_a_head_with_a_hidden_layer_learns_faster_and_is_decayed_less(bare: Path) -> None:
    words = ("model.backbone=resnet18", "model.head=")
    linear, mlp = (complete(bare, 1000, words[0], words[1] + kind) for kind in ("linear", "mlp"))
    assert mlp.stages.backbone.rate == pytest.approx(3 * linear.stages.backbone.rate)
    assert mlp.optimizer.weight_decay == pytest.approx(0.3 * linear.optimizer.weight_decay)
