"""All problems of a config are reported at once, before anything is written."""

from pathlib import Path

import fsspec
import pytest
from catalogue_making import Bench, samples

from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.retries import RefusedError
from pencil_scale.train import __main__ as train
from pencil_scale.train.checks import Problems, check_settings


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.shard("0.tar", samples(range(10)))
    bench.index()
    return bench


def files_of(storage: str) -> dict[str, bytes]:
    files, path = fsspec.core.url_to_fs(storage)
    return {name: files.cat_file(name) for name in files.find(path)}


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_every_problem_is_reported_in_one_go_and_nothing_is_written(
    bench: Bench, dry_run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = files_of(bench.storage)
    capsys.readouterr()
    wrong = ["optimizer.precision=bf16", "images.decode=gpu", "images.resize=4", "images.crop=4"]
    wrong += ["data.label=txt", f"model.weights={bench.folder}/nowhere.pt", "stages.pencil.lambda=0"]
    assert train.main([str(bench.folder / "config.yaml"), *wrong, *dry_run]) == 2
    lines = capsys.readouterr().err.splitlines()
    expected = ["workers.gpu: false", "run.storage: memory://", "data.label: found txt", "nowhere.pt"]
    expected += ["stages.pencil: no label can change"]
    assert len(lines) == len(expected), lines
    assert all(any(words in line for line in lines) for words in expected), lines
    assert files_of(bench.storage) == before


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_problems_of_a_head_are_reported_before_its_features_are_computed(
    bench: Bench, dry_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(bench.storage)
    wrong = [
        "model.backbone=feature_making:classifier",
        "model.head=linear",
        "tracking.uri=http://tracking:1",
    ]
    wrong += ["stages.backbone.epochs=0", "stages.pencil.epochs=0", "stages.finetune.epochs=0"]
    wrong += ["data.test=/nowhere/x.tar"]
    assert train.main([str(bench.folder / "config.yaml"), *wrong, *dry_run]) == 2
    lines = capsys.readouterr().err
    assert "have 0 epochs; nothing would be trained" in lines
    assert "run `python -m pipelines.index_shards" in lines  # the clean set of data.test
    assert files_of(bench.storage) == before


def test_the_weights_of_a_head_s_features_are_those_of_its_network(bench: Bench) -> None:
    keys = ["model.backbone=resnet18", "model.head=linear", "features.weights=imagenet"]
    with pytest.raises(
        PencilError, match=r"features.weights: imagenet; with model.head .*set that one alone"
    ):
        load_config(bench.folder / "config.yaml", keys)


def test_problems_that_were_found_are_reported_even_if_a_store_then_refuses_access() -> None:
    problems = Problems()
    problems.add("workers.gpu: false, but ...")
    with (
        pytest.raises(RefusedError, match=r"^s3://lake/x: no access\nworkers.gpu: false") as error,
        problems.noted(),
    ):
        raise RefusedError("s3://lake/x: no access")
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("decode", ["gpu", "0.3"])
def test_settings_for_a_gpu_without_one_are_named_with_what_to_set(bench: Bench, decode: str) -> None:
    problems = Problems()
    wrong = ["optimizer.compile=default", f"images.decode={decode}", "images.resize=4", "images.crop=4"]
    wrong += ["tracking.uri=http://tracking:5000"]
    check_settings(load_config(bench.folder / "config.yaml", wrong), problems)
    expected = f"optimizer.compile=default, images.decode={decode} is for GPUs; set "
    with pytest.raises(Exception, match=expected):
        problems.require_none()
    problems = Problems()
    check_settings(load_config(bench.folder / "config.yaml", [*wrong, "workers.gpu=true"]), problems)
    problems.require_none()
