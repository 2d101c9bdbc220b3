"""The shipped configs have the paper's numbers, expressed as pull and label rate."""

from pathlib import Path

import pytest

from pencil_scale.config.loader import load_config
from pencil_scale.method.outlook import check_outlook
from pencil_scale.method.schedule import Schedule

CONFIGS = Path(__file__).parents[2] / "configs"


def schedule(name: str, num_classes: int, *overrides: str) -> Schedule:
    config = load_config(CONFIGS / f"{name}.yaml", list(overrides))
    return Schedule(config.stages, config.optimizer, num_classes, config.optimizer.tuned_batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_classes", "epochs", "pull", "label_rates"),
    [
        ("cifar10", 10, 320, 1.0, (0.3125, 0.3125)),
        ("cifar100", 100, 320, 10.0, (0.78125, 0.78125)),
        ("clothing1m", 14, 25, 1.12, (6.696, 1.116)),
        ("cub200", 200, 160, 0.0, (0.3125, 0.3125)),
    ],
)
def test_a_config_has_the_papers_numbers(
    name: str, num_classes: int, epochs: int, pull: float, label_rates: tuple[float, float]
) -> None:
    found = schedule(name, num_classes)
    rates = found.label_rates()
    assert found.epochs == epochs
    assert (rates[0], rates[-1]) == pytest.approx(label_rates, abs=1e-3)
    assert found.stage_at(found.stages.backbone.epochs).pull == pytest.approx(pull)
    assert check_outlook(found)


def test_a_row_of_the_papers_table_is_a_set_of_overrides() -> None:
    asymmetric = ["stages.backbone.rate=0.03", "stages.pencil.rate=0.03", "stages.pencil.alpha=0"]
    found = schedule(
        "cifar10", 10, *asymmetric, "stages.pencil.beta=0.4", "stages.pencil.lambda={start: 3000, end: 0}"
    )
    rates = found.label_rates()
    assert (rates[0], rates[-1]) == pytest.approx((2.34375, 0.0))
    assert "changes after 3 of 130 visits" in check_outlook(found)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_class_list_is_beside_the_shards_where_make_shards_writes_it(path: Path) -> None:
    data = load_config(path).data
    assert data.classes == f"{data.shards[0].rpartition('/')[0]}/classes.txt"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_classes"), [("demo", 10), ("nightly", 14)])
def test_every_other_config_changes_labels_within_its_pencil_stage(name: str, num_classes: int) -> None:
    assert " changes after " in check_outlook(schedule(name, num_classes))
