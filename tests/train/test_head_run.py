"""A run that trains a head on features: labels are repaired, and the model it publishes takes images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import TinyData, kill_quietly

from benchmarks.processes import family
from pencil_scale.config.loader import load_config
from pencil_scale.features.manifest import FeatureManifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.storage import Storage
from pencil_scale.train.run import train
from pencil_scale.train.summary import Summary

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

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


def test_two_workers_train_the_head_as_one_does(tmp_path: Path) -> None:
    data = TinyData.make(tmp_path)
    alone = run(data, *ALONE, "run.name=alone", "optimizer.batch_per_worker=32", "gate.hold=false")
    both = run(data, "run.name=both", "gate.hold=false")
    assert both.facts["coverage"] == [1.0] * 6
    one, two = (torch.load(summary.facts["model"], weights_only=True) for summary in (alone, both))
    assert np.allclose(one["1.weight"], two["1.weight"], atol=0.2)


EVIDENCE = ["evidence.watched=null", "evidence.folds=1", "gate.hold=false"]


def test_a_head_run_killed_in_the_middle_of_an_epoch_ends_with_the_same_labels_and_model(
    ray_session: None, tmp_path: Path
) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "undisturbed").mkdir()
    killed, undisturbed = (TinyData.make(tmp_path / name) for name in ("killed", "undisturbed"))
    with killed.start(*HEAD, *EVIDENCE, "workers.count=1", "checkpoint.every_steps=11") as command:
        command.wait_until(lambda: killed.has_checkpoint(37), "checkpoint in the middle of an epoch")
        for pid in family(command.process.pid):
            kill_quietly(pid)  # -9
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    for data in (killed, undisturbed):
        assert run(data, *ALONE, *EVIDENCE, "checkpoint.every_steps=50").facts["coverage"] == [1.0] * 6
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
