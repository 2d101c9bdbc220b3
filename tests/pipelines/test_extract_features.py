"""extract_features: each row has the features of its own image, and no image is computed twice."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue_making import Bench, image, sample, samples

from pencil_scale.config.loader import load_config
from pencil_scale.features import extraction
from pencil_scale.features.manifest import MANIFEST, FeatureManifest
from pencil_scale.features.table import FeatureTable
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pipelines.extract_features import Summary, run

PLAIN = ("images.mean=[0, 0, 0]", "images.std=[1, 1, 1]")


class FeatureBench(Bench):
    """A catalogue in memory, and the job over it."""

    def extract(self, *overrides: str, backbone: str = "feature_making:colours") -> Summary:
        keys = [f"features.backbone={backbone}", *PLAIN, *overrides]
        return run(load_config(self.folder / "config.yaml", keys))

    def table(self, summary: Summary) -> FeatureTable:
        return FeatureTable.open(Storage(self.storage), summary.manifest.key, self.folder)

    def files(self, summary: Summary) -> list[str]:
        folder = Storage(self.storage).features(summary.manifest.key)
        return [Path(name).name for name in Storage(self.storage).names(folder)]


@pytest.fixture
def bench(tmp_path: Path, small_label_parts: None) -> FeatureBench:
    """Two shards of 150 images, whose red channel is their number."""
    made = FeatureBench(tmp_path)
    made.shard("00.tar", samples(range(150)))
    made.shard("01.tar", samples(range(150, 250)))
    made.index()
    return made


def red(numbers: Any) -> Any:
    return np.float16(np.array(numbers) / 255)


def test_each_row_has_the_features_of_its_own_image(bench: FeatureBench) -> None:
    summary = bench.extract("features.views=2")
    table = bench.table(summary)
    assert table.features.shape == (250, 2, 6)
    assert np.allclose(table.features[:, 0, 0], red(range(250)), atol=1e-3)
    assert np.array_equal(table.features[:, 0], table.features[:, 1])  # of one colour: the mirror is equal
    assert summary.num_computed == summary.manifest.counts["ready"] == 250
    made_by = summary.manifest.made_by
    assert made_by["backbone"] == "feature_making:colours"
    assert "pillow" in made_by["decoders"]
    assert made_by["images"]["crop"] == 4


def test_a_network_with_a_head_gives_what_its_head_would_receive(bench: FeatureBench) -> None:
    plain = bench.table(bench.extract())
    headless = bench.extract(backbone="feature_making:classifier")
    assert headless.manifest.dimension == 6
    assert np.array_equal(bench.table(headless).features, plain.features)


def test_a_grown_catalogue_needs_features_of_new_and_changed_images_only(bench: FeatureBench) -> None:
    bench.extract()
    members = samples(range(150))
    members[7 * 3] = ("000007.png", image(407))
    bench.shard("00.tar", members)
    bench.shard("02.tar", samples(range(250, 275)))
    bench.index()
    summary = bench.extract()
    assert summary.num_computed == 26
    features = bench.table(summary).features
    assert features[7, 0, 0] == pytest.approx((407 % 256) / 255, abs=1e-3)
    assert np.allclose(features[250:, 0, 0], red(np.arange(250, 275) % 256), atol=1e-3)
    assert bench.extract().num_computed == 0


def test_excluded_and_vanished_samples_lose_their_features(bench: FeatureBench) -> None:
    before = bench.files(bench.extract())
    (bench.folder / "exclude.txt").write_text("000003\n")
    (bench.folder / "01.tar").unlink()
    bench.index(exclude=str(bench.folder / "exclude.txt"))
    summary = bench.extract()
    table = bench.table(summary)
    gone = np.array([3, *range(150, 250)])
    assert not table.features[gone].any()
    assert not table.state[gone].any()
    assert (np.delete(table.state, gone) == 1).all()
    assert summary.num_computed == 0
    arrows = {name for name in before if name.endswith(".arrow")}
    assert arrows
    assert not arrows & set(bench.files(summary))  # the files that hold them are removed


def test_an_id_on_the_exclude_list_has_no_features_even_before_indexing_again(bench: FeatureBench) -> None:
    (bench.folder / "exclude.txt").write_text("000003\n")
    summary = bench.extract(f"data.exclude={bench.folder / 'exclude.txt'}")
    assert not bench.table(summary).features[3].any()
    assert summary.num_computed == 249


@pytest.mark.parametrize(
    "change", [("images.std=[1, 1, 2]",), ("images.crop=2",), ("features.views=2",), ("doubled",)]
)
def test_other_weights_images_or_views_make_other_features(bench: FeatureBench, change: tuple[str]) -> None:
    first = bench.extract()
    doubled = change == ("doubled",)
    other = bench.extract(backbone="feature_making:doubled") if doubled else bench.extract(*change)
    assert other.manifest.key != first.manifest.key
    assert other.num_computed == 250


def test_a_job_that_was_killed_resumes_where_it_had_saved(
    bench: FeatureBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def dies(job: Any, window: Any) -> Any:
        windows.append(window)
        if len(windows) == 3:
            raise KeyboardInterrupt
        return extraction.extract(job, window)

    with monkeypatch.context() as patch:
        patch.setattr("pencil_scale.train.extract.extract", dies)
        with pytest.raises(KeyboardInterrupt):
            bench.extract()
    summary = bench.extract()
    assert summary.num_computed == 250 - 2 * extraction.FEWEST_ROWS
    assert np.allclose(bench.table(summary).features[:, 0, 0], red(range(250)), atol=1e-3)
    assert sorted(re.sub(r"\w{64}", "X", name) for name in bench.files(summary)) == [
        "X.arrow",
        "lease",
        MANIFEST,
    ]


def test_a_job_that_could_not_save_at_its_end_keeps_what_it_saved_now_and_then(
    bench: FeatureBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.shard("02.tar", samples(range(250, 3000)))
    bench.index()
    windows = []

    def killed(job: Any, window: Any) -> Any:
        windows.append(window)
        if len(windows) == 40:  # in the second of three parts
            patch.setattr(extraction.Extraction, "save", lambda self: None)
            raise KeyboardInterrupt
        return extraction.extract(job, window)

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "SAVE_EVERY_S", 0.0)
        patch.setattr("pencil_scale.train.extract.extract", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.extract()
    summary = bench.extract()
    assert summary.num_computed == 3000 - 39 * extraction.FEWEST_ROWS
    assert summary.manifest.layout.num_parts == 3
    assert np.allclose(bench.table(summary).features[:, 0, 0], red(np.arange(3000) % 256), atol=1e-3)


def test_a_missing_part_is_computed_again(bench: FeatureBench) -> None:
    first = bench.extract()
    storage = Storage(bench.storage)
    (name,) = [name for name in bench.files(first) if name.endswith(".arrow")]
    storage.delete(storage.features(first.manifest.key, name))
    assert bench.extract().num_computed == 250
    assert FeatureManifest.load(storage, first.manifest.key) == first.manifest


def test_images_that_cannot_be_decoded_are_flagged_and_named(tmp_path: Path) -> None:
    bench = FeatureBench(tmp_path)
    spoilt = sample(5)
    spoilt[0] = (spoilt[0][0], spoilt[0][1][:41] + bytes(20) + spoilt[0][1][61:])
    bench.shard("00.tar", [*samples(range(5)), *spoilt, *samples(range(6, 10))])
    bench.index()
    summary = bench.extract("data.max_damaged_share=0.2")
    table = bench.table(summary)
    assert table.state.tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    assert not table.features[5].any()
    assert summary.manifest.counts == {"ready": 9, "unreadable": 1, "absent": 0}
    assert re.match(r"row 5 \('000005'\): png of \d+ bytes: ", summary.problems[0])
    with pytest.raises(PencilError, match=r"1 of 10 images cannot be decoded.*raise data.max_damaged_share"):
        bench.extract("data.max_damaged_share=0.05", "features.views=2")


def test_what_cannot_give_features_is_refused(bench: FeatureBench) -> None:
    with pytest.raises(PencilError, match=r"features.backbone: no network 'resnet5'"):
        bench.extract(backbone="resnet5")
    with pytest.raises(PencilError, match="gives classes for an image, as its head is not a linear layer"):
        bench.extract("images.resize=64", "images.crop=64", backbone="squeezenet1_1")
    with pytest.raises(PencilError, match=r"picky fails on an image of 4 x 4 pixels.*images.crop"):
        bench.extract(backbone="feature_making:picky")


@pytest.mark.ray
def test_ray_tasks_give_the_same_features_as_this_process(tmp_path: Path, ray_session: None) -> None:
    bench = FeatureBench(tmp_path)
    bench.shard("00.tar", samples(range(300)))
    bench.index()
    alone = bench.table(bench.extract(backbone="small_convnet"))
    bench.storage = str(tmp_path / "lake")
    bench.index()
    summary = bench.extract(backbone="small_convnet")
    together = FeatureTable.open(Storage(bench.storage), summary.manifest.key, tmp_path / "copy")
    assert np.allclose(together.features, alone.features, atol=1e-3)
    assert (together.features[0] != together.features[200]).any()


@pytest.mark.slow
def test_features_on_an_object_store(
    tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    # The environment leads only this process to the server, not the cluster of other tests.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    s3fs.S3FileSystem().mkdir("lake")
    bench = FeatureBench(tmp_path)
    bench.storage = "s3://lake/clothes"
    bench.shard("00.tar", samples(range(20)))
    bench.index()
    assert bench.extract().num_computed == 20
    bench.shard("01.tar", samples(range(20, 25)))
    bench.index()
    summary = bench.extract()
    assert summary.num_computed == 5
    assert np.allclose(bench.table(summary).features[:, 0, 0], red(range(25)), atol=1e-3)
    assert len([name for name in bench.files(summary) if name.endswith(".arrow")]) == 1
