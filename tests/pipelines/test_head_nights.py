"""Nights that train a head: features of new images only, and none of samples that are gone."""

import re
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from night_making import Crawl

from pencil_scale.features.manifest import READY, FeatureManifest
from pencil_scale.features.table import FeatureTable
from pencil_scale.labels.run_record import read_record
from pencil_scale.method.backbones import build_backbone
from pencil_scale.nights.start import run_facts
from pencil_scale.storage.storage import Storage
from pipelines import export_features, extract_features, import_features, index_shards, reclean_nightly

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

HEAD = ["model.backbone=feature_making:classifier", "model.head=linear", "stages.backbone.rate=0.2"]
HEAD += ["nightly.first_epochs=[2,1,1]", "nightly.max_changed_share=1", "gate.hold=false"]
GONE = [*range(80), 85]


IMPORTED = ["model.backbone=null", "model.head=mlp", "features.name=clip", "data.test=null"]


class HeadNights:
    """A crawl, and nights that train a head on it."""

    def __init__(self, folder: Path) -> None:
        self.crawl = Crawl(folder)
        self.storage = Storage(str(folder / "lake"))
        self.exclude = folder / "exclude.txt"
        self.exclude.write_text("")

    def night(self, *overrides: str) -> None:
        assert self.code(*HEAD, *overrides) == 0

    def code(self, *overrides: str) -> int:
        return reclean_nightly.main([str(self.crawl.config), f"data.exclude={self.exclude}", *overrides])

    def import_all(self, num_samples: int) -> None:
        """Import vectors of the first samples, by which their colours are known."""
        vectors = 3 * np.eye(4, 9)[np.arange(num_samples) % 4]
        np.save(self.crawl.folder / "clip.npy", vectors + np.random.default_rng(1).normal(size=vectors.shape))
        (self.crawl.folder / "ids.txt").write_text("".join(f"{n:06d}\n" for n in range(num_samples)))
        file = f"features.file={self.crawl.folder}/clip.npy"
        words = (file, f"features.ids={self.crawl.folder}/ids.txt", "features.name=clip")
        import_features.run(self.crawl.settings(*words))

    def ready(self, key: str | None = None) -> list[int]:
        """The rows that have features; all others are zeros."""
        key = key or FeatureManifest.choose(self.storage, None).key
        table = FeatureTable.open(self.storage, key, self.crawl.folder)
        rows = np.flatnonzero(table.state == READY)
        assert not np.delete(table.features, rows, axis=0).any()
        return rows.tolist()

    def features_of(self, night: str) -> str:
        """The key of the features that a night was trained on."""
        record = read_record(self.storage.url, night)
        assert record is not None
        return record.settings["features.name"]

    def exported(self, key: str) -> list[int]:
        """The samples whose features are exported."""
        file = self.crawl.folder / "out.parquet"
        words = (f"features.name={key}", f"features.file={file}", f"data.exclude={self.exclude}")
        export_features.run(self.crawl.settings(*words))
        return sorted(map(int, pq.read_table(file)["sample_id"].to_pylist()))


def test_a_night_computes_features_of_what_is_new_and_drops_those_of_samples_that_are_gone(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights = HeadNights(tmp_path)
    for number in range(10):
        nights.crawl.add(number)
    nights.night()
    nights.crawl.add(10)
    nights.night()
    computed = re.findall(r"features: (\d+) computed now", capsys.readouterr().out)
    assert computed == ["800", "80"]
    assert nights.ready() == list(range(880))
    assert run_facts(nights.storage.url, "night-0001")["test_accuracy"] > 0.9
    assert (
        run_facts(nights.storage.url, "night-0002")["test_accuracy"] > 0.9
    )  # it continues its parent's head

    other = extract_features.run(nights.crawl.settings("features.backbone=feature_making:doubled"))
    nights.exclude.write_text("000085\n")
    (tmp_path / "crawl-000.tar").unlink()
    nights.night()  # nothing is trained
    rest = sorted(set(range(880)) - set(GONE))
    assert nights.ready(nights.features_of("night-0002")) == rest
    assert nights.ready(other.manifest.key) == rest  # features of a network that is not used
    assert nights.exported(other.manifest.key) == rest
    labels = ds.dataset(tmp_path / "lake/exports/night-0003/table").to_table()
    assert 85 not in labels["row"].to_pylist()


def test_a_night_continues_the_head_of_the_night_before_on_imported_features(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights = HeadNights(tmp_path)
    keys = [*HEAD[2:], *IMPORTED]
    nights.crawl.add(0)
    nights.crawl.add(1)
    index_shards.run(nights.crawl.settings(*keys))
    nights.import_all(160)
    assert nights.code(*keys) == 0
    nights.crawl.add(2)
    assert nights.code(*keys) == 2
    assert (
        "80 samples of 160 without features; run extract_features, or import_features"
        in capsys.readouterr().err
    )
    nights.import_all(240)
    assert nights.code(*keys) == 0
    assert nights.crawl.current == "night-0002"
    facts = run_facts(nights.storage.url, "night-0002")
    assert facts["model_takes"] == "the features clip, not images"
    network = build_backbone("features:9", 4, facts["model"])
    vectors = np.load(tmp_path / "clip.npy")
    predicted = network(torch.tensor(vectors).float()).argmax(1).numpy()
    assert (predicted == np.arange(240) % 4).mean() > 0.6  # far above chance, after two short nights
