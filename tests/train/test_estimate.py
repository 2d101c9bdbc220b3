"""The estimate of a run against what can be counted by hand."""

from pathlib import Path

import pytest
import torch
from catalogue_making import Bench, samples
from label_making import names, new_labels

from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pencil_scale.train import plan as planning
from pencil_scale.train.checkpoints import Progress, Saved
from pencil_scale.train.plan import count, estimate, make_plan, table, train_briefly
from pencil_scale.train.summary import compare_with_outcome


def test_an_estimate_counts_what_the_catalogue_holds(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(40)))
    catalogue = bench.index().catalogue
    overrides = ["images.crop=4", "workers.count=2", "optimizer.batch_per_worker=8", "cost.gpu_hour=3"]
    config = load_config(tmp_path / "config.yaml", overrides)
    plan = make_plan(config)
    found = estimate(plan, images_per_s=50)
    num_bytes = sum(row["image_bytes"] for row in catalogue.read(0, 40).to_pylist())
    assert (found["samples"], found["epochs"], found["steps_per_epoch"]) == (40, 3, 3)
    assert found["read_gb"] == pytest.approx(3 * num_bytes / 1e9)
    assert found["images_per_s"] == pytest.approx(2 * 50)
    assert found["hours"] == pytest.approx(40 * 3 / 100 / 3600)
    assert found["cost"] == pytest.approx(2 * found["hours"] * 3)
    assert [line.split() for line in table(found).splitlines()][:2] == [["samples", "40"], ["epochs", "3"]]
    assert "cost" not in table({**found, "cost": None})
    assert count(plan).items() <= found.items()


def test_a_run_without_an_epoch_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(4)))
    bench.index()
    none = [f"stages.{name}.epochs=0" for name in ("backbone", "pencil", "finetune")]
    with pytest.raises(PencilError, match="0 epochs; nothing would be trained"):
        make_plan(load_config(tmp_path / "config.yaml", [*none, "images.crop=4"]))


@pytest.mark.slow
def test_a_trial_reads_and_computes_as_one_worker_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(40)))
    bench.index()
    options = ["images.crop=4", "optimizer.batch_per_worker=8"]
    options += ["stages.pencil.teacher=0.9", "stages.pencil.mixup=1"]
    plan = make_plan(load_config(tmp_path / "config.yaml", options))
    monkeypatch.setattr(planning, "TRIAL_S", 0.1)
    for epoch in (0, plan.config.stages.backbone.epochs):
        assert train_briefly(plan.config, plan.stream, 3, plan.schedule.stage_at(epoch)) > 0
    assert plan.weight_bytes > 57_000 * 4


def test_the_outcome_is_stored_with_what_was_counted_and_estimated_from_the_first_epochs(
    tmp_path: Path,
) -> None:
    config = load_config(Path("configs/demo.yaml"), ["workers.count=2", "cost.gpu_hour=3"])
    weights = {"weight": torch.zeros(10, 3)}
    optimizer = {"state": {0: {"momentum_buffer": torch.zeros(10, 3)}}, "param_groups": []}
    labels = new_labels(tmp_path / "store", [0, 1, 2], names(3))
    figures = [
        {"epoch_s": seconds, "images_per_s": 3 / seconds, "rows_visited": 3.0} for seconds in (36, 9, 18)
    ]
    saved = Saved("a1b2", weights, optimizer, Progress(epoch=3, all_steps=9), labels, figures)
    found = compare_with_outcome(config, {"samples": 3, "epochs": 3}, saved)
    assert found["estimate"]["samples"] == found["came_to"]["samples"] == 3
    assert found["estimate"]["hours"] == pytest.approx((36 + 2 * 9) / 3600)
    assert found["estimate"]["cost"] == pytest.approx(2 * 3 * (36 + 2 * 9) / 3600)
    assert "first epoch" in found["estimate"]["hours_from"]
    assert found["came_to"]["hours"] == pytest.approx(63 / 3600)
    assert found["came_to"]["steps_per_epoch"] == 3.0
    assert found["came_to"]["checkpoint_bytes"] == 2 * 10 * 3 * 4
    stored = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.arrow"))
    assert found["came_to"]["table_bytes"] == stored
