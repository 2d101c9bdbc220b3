"""What a run is said to take, against what can be counted by hand."""

from pathlib import Path

import pytest
from catalogue_making import Bench, samples

from pencil_scale.config import load_config
from pencil_scale.running import estimate as estimating
from pencil_scale.running.checks import check_run
from pencil_scale.running.estimate import Trial, estimate, joined_rate
from pencil_scale.stream import StreamSpec


def test_a_cpu_reads_and_computes_in_turn_and_a_gpu_at_once() -> None:
    trial = Trial(read_per_s=300, computed_per_s=600, weight_bytes=0)
    assert joined_rate(trial, gpu=False) == pytest.approx(200)
    assert joined_rate(trial, gpu=True) == 300


def test_an_estimate_counts_what_the_catalogue_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(40)))
    catalogue = bench.index().catalogue
    overrides = ["images.crop=4", "workers.count=2", "optimizer.batch_per_worker=8", "cost.gpu_hour=3"]
    config = load_config(tmp_path / "config.yaml", overrides)
    checked = check_run(config)
    found = estimate(config, checked, Trial(read_per_s=100, computed_per_s=100, weight_bytes=1000))
    num_bytes = sum(row["image_bytes"] for row in catalogue.read(0, 40).to_pylist())
    assert (found.samples, found.epochs, found.steps_an_epoch) == (40, 3, 3)
    assert found.read_gb == pytest.approx(3 * num_bytes / 1e9)
    assert found.images_per_s == pytest.approx(2 * 50)
    assert found.hours == pytest.approx(40 * 3 / 100 / 3600)
    assert found.cost == pytest.approx(2 * found.hours * 3)
    assert "set cost" not in found.table()
    monkeypatch.setattr(estimating, "READING_S", 0.1)
    monkeypatch.setattr(estimating, "COMPUTING_S", 0.1)
    trial = estimating._try(config, StreamSpec.from_config(config, catalogue.version), 3, checked.schedule)
    assert trial.read_per_s > 0
    assert trial.computed_per_s > 0
    assert trial.weight_bytes > 57_000 * 4
