"""A run that trains a head on features: labels are repaired, and the model it publishes takes images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_making import classifier
from tar_making import python_tar
from training_runs import COLOURS, TinyData, kill_quietly, sample

from benchmarks.processes import family
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.features.manifest import FeatureManifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pencil_scale.train.run import train
from pencil_scale.train.summary import Summary
from pipelines import import_features, index_shards

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
pytestmark += [pytest.mark.usefixtures("ray_session")]

HEAD = ["model.backbone=feature_making:classifier", "model.head=linear", "stages.backbone.rate=0.1"]
HEAD += ["stages.pencil.rate=0.1", "stages.finetune.rate=0.1", "features.views=2"]
ALONE = ["workers.count=1", "workers.in_process=true"]


def run(data: TinyData, *overrides: str) -> Summary:
    return train(load_config(data.folder / "config.yaml", [*HEAD, *overrides]))


def test_a_head_is_trained_on_features_and_published_with_its_network(tmp_path: Path) -> None:
    data = TinyData.make(tmp_path)
    summary = run(data, *ALONE, "gate.hold=false")
    assert summary.facts["coverage"] == [1.0] * 6
    assert summary.facts["corrected"] > 50
    network = build_backbone("feature_making:classifier", 4, summary.facts["model"]).eval()
    red, green = (torch.tensor([200.0, 60, 60]), torch.tensor([60.0, 200, 60]))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = torch.stack([(colour / 255 - mean) / std for colour in (red, green)])[:, :, None, None]
    assert network(images.expand(-1, -1, 8, 8)).argmax(1).tolist() == [0, 1]

    storage = Storage(str(tmp_path / "lake"))
    features = FeatureManifest.choose(storage, None)
    assert (features.views, features.counts["ready"]) == (2, data.num_samples - 1)
    record = json.loads((tmp_path / "lake/runs/tiny/run.json").read_text())
    assert record["settings"]["features.name"] == features.key


def test_a_head_is_trained_on_imported_features_and_published_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, chance = TinyData.make(tmp_path), np.random.default_rng(1)
    true = np.arange(data.num_samples) % 4
    vectors = 3 * np.eye(4, 7)[true] + chance.normal(size=(data.num_samples, 7))
    np.save(tmp_path / "clip.npy", vectors)
    (tmp_path / "ids.txt").write_text("".join(f"{number:05d}\n" for number in range(data.num_samples)))
    keys = [f"features.file={tmp_path}/clip.npy", f"features.ids={tmp_path}/ids.txt", "features.name=clip"]
    keys += ["model.backbone=null", "model.head=mlp", "features.views=1", *ALONE, "gate.hold=false"]
    config = load_config(tmp_path / "config.yaml", [*HEAD[2:-1], *keys])
    import_features.run(config)
    summary = train(config)
    assert "a mlp head on the imported features clip, without a network" in capsys.readouterr().out
    assert summary.facts["model_takes"] == "the features clip, not images"
    assert summary.facts["corrected"] > 50
    network = build_backbone("features:7", 4, summary.facts["model"])
    assert (network(torch.tensor(vectors).float()).argmax(1).numpy() == true).mean() > 0.9

    update = {"data": config.data.model_copy(update={"validation": ("clean.tar",)})}
    with pytest.raises(PencilError, match="clean sets have images, and a head on imported features takes"):
        train(with_name(config.model_copy(update=update), "clean"))
    computed = config.model.model_copy(update={"backbone": "resnet18"})
    with pytest.raises(PencilError, match="clip was imported, so nothing says that resnet18 gave these"):
        train(with_name(config.model_copy(update={"model": computed}), "computed"))


def with_name(config: Config, name: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def clean_set(data: TinyData, num: int) -> list[str]:
    """Index a shard of samples with right classes; return the settings that use it as evidence."""
    chance, clean = np.random.default_rng(9), data.folder / "clean"
    clean.mkdir()
    samples = [sample(number, chance) for number in range(len(COLOURS) * 1000, len(COLOURS) * 1000 + num)]
    right = [
        (name, b"%d" % (int(name[:5]) % 4) if name.endswith("cls") else body)
        for one in samples
        for name, body in one
    ]
    (clean / "000.tar").write_bytes(python_tar(right))
    settings = [f"data.test={clean}/*.tar", "evidence.clean=test", "evidence.watched=0.3"]
    index_shards.run(load_config(data.folder / "config.yaml", settings))
    return settings


def test_two_workers_train_the_head_as_one_does_and_count_the_clean_set_once(tmp_path: Path) -> None:
    data = TinyData.make(tmp_path)
    settings = [*clean_set(data, 203), "gate.hold=false"]
    alone = run(data, *ALONE, "run.name=alone", "optimizer.batch_per_worker=32", *settings)
    both = run(data, "run.name=both", *settings)
    assert both.facts["coverage"] == [1.0] * 6
    assert 0.05 * data.num_samples < alone.facts["proven_wrong"] < alone.facts["corrected"]
    for summary in (alone, both):
        name = summary.facts["run"]
        last = json.loads((tmp_path / f"lake/runs/{name}/epochs.json").read_text())[-1]
        assert sum(last["clean_counts"][1]) == 203
        assert sum(last["watched_counts"][1]) == summary.facts["watched"] > 100
        assert last["test_accuracy"] == last["clean_counts"][0][0] / 203
    one, two = (torch.load(summary.facts["model"], weights_only=True) for summary in (alone, both))
    assert np.allclose(one["1.weight"], two["1.weight"], atol=0.2)


EVIDENCE = ["evidence.watched=null", "evidence.folds=1", "gate.hold=false"]


def test_a_head_run_killed_in_the_middle_of_an_epoch_ends_with_the_same_labels_and_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "undisturbed").mkdir()
    killed, undisturbed = (TinyData.make(tmp_path / name) for name in ("killed", "undisturbed"))
    weights = tmp_path / "weights.pt"
    torch.save(classifier(4).state_dict(), weights)
    options = [*EVIDENCE, f"model.weights={weights}"]
    with killed.start(*HEAD, *options, "workers.count=1", "checkpoint.every_steps=11") as command:
        command.wait_until(lambda: killed.has_checkpoint(37), "checkpoint in the middle of an epoch")
        for pid in family(command.process.pid):
            kill_quietly(pid)  # -9
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    for data in (undisturbed, killed):
        assert run(data, *ALONE, *options, "checkpoint.every_steps=50").facts["coverage"] == [1.0] * 6
        weights.unlink(missing_ok=True)  # the run that was killed has a copy, and its features
    torch.set_num_threads(num_threads)
    assert killed.record()["attempt"] == 2
    models = [
        torch.load(data.storage / "models/tiny.pt", weights_only=True) for data in (killed, undisturbed)
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    labels = [PublishedLabels(data.labels()).rows(range(data.num_samples)) for data in (killed, undisturbed)]
    assert np.array_equal(labels[0].logits, labels[1].logits)
    assert np.array_equal(labels[0].predicted_log_p, labels[1].predicted_log_p, equal_nan=True)
    assert (labels[0].logits.argmax(1) != labels[0].noisy_class).sum() > 50
