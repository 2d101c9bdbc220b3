"""Exports contain what is known about every sample, except excluded ones."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from catalogue_making import image, sample, samples
from export_making import ExportBench, two_shards
from night_making import pins_of

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.export.files import ExportManifest, read_manifest, same_content
from pencil_scale.labels.pins import add_pins, read_pins
from pencil_scale.labels.published import published_url
from pencil_scale.labels.report import HISTORY
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease, LeaseLostError
from pipelines import export_labels


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    return two_shards(tmp_path)


def test_the_most_doubtful_labels_are_ranked_changed_or_kept(
    bench: ExportBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pencil_scale.export.table.MOST_DOUBTFUL", 5)
    summary = bench.export()
    found = pq.read_table(bench.out / summary.manifest.doubts).to_pylist()
    assert [one["row"] for one in found] == [1, 7, 0, 2, 3]
    assert [one["is_label_issue"] for one in found] == [True, True, False, False, False]
    scores = [one["label_score"] for one in found]
    assert scores == sorted(scores)
    bench.publish({})  # nothing changed, and there still is a ranking
    add_pins(bench.storage, pins_of({0: "bee"}))
    again = bench.export()
    assert [one["row"] for one in pq.read_table(bench.out / again.manifest.doubts).to_pylist()] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert not (bench.out / summary.manifest.doubts).exists()  # outdated


def test_a_sidecar_has_cleanlabs_columns_and_everything_known_about_a_sample(bench: ExportBench) -> None:
    bench.export()
    exported = bench.sidecar("00041")[1]
    shares = exported.pop("top_shares")
    scores = [exported.pop(name) for name in ("label_score", "confidence", "margin")]
    assert exported == {
        "row": 1,
        "sample_id": "000001",
        "shard": str(bench.folder / "00041.tar"),
        "key": "000001",
        "given_label": 1,
        "predicted_label": 2,
        "is_label_issue": True,
        "given_class": "bee",
        "predicted_class": "cat",
        "top_labels": [2, 0, 1],
        "learned_label": 2,
        "last_change_epoch": None,
        "pinned": False,
        "status": "ok",
        "predicted_by": "labels",
        "catalogue_version": 1,
        "model_version": "t",
    }
    np.testing.assert_allclose(scores, [0.1, 0.8, 0.7], atol=1e-6)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=1e-6)
    assert [exported["is_label_issue"] for exported in bench.table()] == [row in (1, 7) for row in range(12)]


def test_only_sidecars_of_shards_whose_labels_changed_are_written_again(bench: ExportBench) -> None:
    assert bench.export().num_written("sidecars") == 2
    before = bench.write_times("sidecars")
    again = bench.export()
    assert (again.num_written("sidecars"), again.num_written("table"), again.removed) == (0, 0, ())
    bench.publish({1: 2, 7: 1})
    third = bench.export()
    assert third.num_written("sidecars") == 1
    after = bench.write_times("sidecars")
    assert after["00041.labels.parquet"] == before["00041.labels.parquet"]
    assert after["00042.labels.parquet"] > before["00042.labels.parquet"]
    assert len(after) == 2  # outdated files are removed


def test_excluded_ids_are_in_no_file_not_even_an_older_one(bench: ExportBench) -> None:
    bench.shard("00043.tar", [*sample(7), *sample(20)])  # an alias of 000007
    bench.index()
    bench.export("export.corrected_shards=true")
    assert _holding(bench.out, b"000007")
    (bench.folder / "gone.txt").write_text("000007\n")
    bench.export("export.corrected_shards=true", f"data.exclude={bench.folder}/gone.txt")  # not yet indexed
    assert not _holding(bench.out, b"000007")
    bench.index(exclude=f"{bench.folder}/gone.txt")
    bench.export("export.corrected_shards=true")
    assert not _holding(bench.out, b"000007")
    assert len(bench.sidecar("00042")) == 5
    assert len(bench.sidecar("00043")) == 1


def test_a_duplicate_is_in_the_sidecar_of_its_own_shard_with_its_own_given_label(bench: ExportBench) -> None:
    bench.shard("00043.tar", sample(1, label=0))
    bench.index()
    bench.export()
    (exported,) = bench.sidecar("00043")
    assert (exported["row"], exported["status"], exported["given_label"], exported["predicted_label"]) == (
        1,
        "duplicate",
        0,
        2,
    )
    assert exported["label_score"] == pytest.approx(0.1)
    assert exported["is_label_issue"]
    assert len(bench.table()) == 12


def test_the_model_predicts_unlabelled_samples(bench: ExportBench) -> None:
    bench.shard(
        "00043.tar", [("x.png", image(77)), ("y.png", b"no image"), ("z.png", image(9)), ("z.cls", b"9")]
    )
    bench.index()
    bench.publish({})
    bench.shard("00044.tar", samples([12]))  # labelled, and newer than the labels: it stays as given
    bench.index()
    torch.manual_seed(0)
    model = build_backbone("small_convnet", 3).eval()
    import fsspec

    with fsspec.open(f"{bench.storage}/models/t.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    summary = bench.export(predict=True)
    exported = {each["key"]: each for each in bench.sidecar("00043")}
    assert summary.predicted_by == {"given": 1, "labels": 12, "model": 2, "none": 1}
    assert exported["y"]["predicted_label"] is None
    assert exported["x"]["given_label"] is None
    assert exported["x"]["label_score"] is None
    assert (exported["x"]["predicted_by"], exported["x"]["is_label_issue"]) == ("model", False)
    config = load_config(bench.folder / "config.yaml", ["images.crop=4"])
    pixels = torch.tensor([77, 0, 7]) / 255
    colour = (pixels - torch.tensor(config.images.mean)) / torch.tensor(config.images.std)
    shares = model(colour[:, None, None].expand(1, 3, 4, 4)).softmax(-1)[0].detach()
    assert exported["x"]["predicted_label"] == int(shares.argmax())
    assert exported["x"]["confidence"] == pytest.approx(float(shares.max()), abs=1e-5)


def test_a_missing_model_is_reported_before_anything_is_written(bench: ExportBench) -> None:
    with pytest.raises(PencilError, match=r"no model .*/models/t.pt .*; set export.predict=false"):
        bench.export(predict=True)
    assert not bench.out.exists()


def test_untrained_rows_and_rows_newer_than_the_labels_are_exported_as_given(bench: ExportBench) -> None:
    bench.publish({1: 2}, visited=[0, 1, 2])
    bench.shard("00043.tar", samples([12]))
    bench.index()
    bench.export()
    exported = bench.table()
    assert [each["predicted_by"] for each in exported] == ["labels"] * 3 + ["given"] * 10
    assert exported[5]["predicted_label"] == exported[5]["given_label"] == 2
    assert exported[5]["confidence"] is None
    assert not any(each["is_label_issue"] for each in exported[3:])


def test_the_epoch_of_the_last_change_is_read_from_the_history(bench: ExportBench) -> None:
    import fsspec

    given = np.arange(12) % 3
    for epoch, row_one in ((4, 0), (5, 2), (7, 2)):
        now = np.where(np.arange(12) == 1, row_one, given).astype(np.uint16)
        url = f"{bench.storage}/labels/history/t/epoch-{epoch:05d}.arrow"
        with fsspec.open(url, "wb") as file, pa.ipc.new_file(file, HISTORY) as writer:
            writer.write_batch(
                pa.record_batch([pa.array(now), pa.array(np.ones(12, np.float16))], schema=HISTORY)
            )
    bench.export()
    assert [each["last_change_epoch"] for each in bench.table()] == [None, 5] + [None] * 10


def test_an_untrained_sample_never_changed_whatever_class_its_history_has(
    tmp_path: Path,
) -> None:
    import fsspec

    bench = ExportBench(tmp_path)
    bench.shard("a.tar", [*samples(range(3)), ("bare.png", image(9))])
    bench.index()
    bench.publish({}, visited=range(3))
    now = np.array([0, 1, 2, 0], np.uint16)  # a table has some class for every row
    url = f"{bench.storage}/labels/history/t/epoch-00008.arrow"
    with fsspec.open(url, "wb", auto_mkdir=True) as file, pa.ipc.new_file(file, HISTORY) as writer:
        writer.write_batch(pa.record_batch([pa.array(now), pa.array(np.ones(4, np.float16))], schema=HISTORY))
    bench.export()
    assert [(each["given_label"], each["last_change_epoch"]) for each in bench.table()] == [
        (0, None),
        (1, None),
        (2, None),
        (None, None),
    ]


def test_the_manifest_lists_every_file_of_the_export(bench: ExportBench) -> None:
    summary = bench.export("export.corrected_shards=true")
    manifest = read_manifest(str(bench.out))
    assert manifest == summary.manifest
    there = {str(path.relative_to(bench.out)) for path in bench.out.rglob("[!.]*") if path.is_file()}
    assert there == manifest.files() | {"manifest.json"}
    assert (manifest.num_samples, manifest.num_label_issues) == (12, 2)


@pytest.mark.ray
def test_a_cluster_writes_the_same_files_as_one_process(tmp_path: Path, ray_session: None) -> None:
    bench = ExportBench(tmp_path)
    for number in range(20):
        bench.shard(f"{number:05d}.tar", samples(range(3 * number, 3 * number + 3)))
    bench.index()
    bench.publish({1: 2})
    here = _files(bench)
    bench.storage, bench.out = str(tmp_path / "lake"), tmp_path / "cluster"
    bench.index()
    bench.publish({1: 2})
    assert _files(bench) == here


def _files(bench: ExportBench) -> dict[str, bytes]:
    """Every file of an export, under a name that depends only on its content."""
    manifest = bench.export("export.corrected_shards=true").manifest
    return {same_content(file): (bench.out / file).read_bytes() for file in manifest.files()}


def _holding(folder: Path, text: bytes) -> list[Path]:
    """Files that contain this text; Parquet is decoded."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = (
                str(pq.read_table(path).to_pylist()).encode()
                if path.suffix == ".parquet"
                else path.read_bytes()
            )
            found += [path] if text in data else []
    return found


def test_an_export_never_removes_a_file_that_no_export_wrote(tmp_path: Path) -> None:
    """`export.folder` may be the folder that holds the training data's own `shards/`."""
    bench = two_shards(tmp_path)
    bench.out.mkdir()
    (bench.out / "shards").mkdir()
    original = bench.out / "shards" / "train-000000.tar"
    original.write_bytes(b"the only copy")
    with pytest.raises(PencilError, match=r"has a folder 'shards' but no manifest.json of an export"):
        bench.export("export.corrected_shards=true")
    assert original.read_bytes() == b"the only copy"
    original.unlink()
    (bench.out / "shards").rmdir()
    bench.export("export.corrected_shards=true")
    theirs = [
        bench.out / "shards" / "mine.tar",
        bench.out / "table" / "mine.parquet",
        bench.out / "notes.txt",
    ]
    for path in theirs:
        path.write_bytes(b"put here later")
    bench.publish({2: 0})
    assert bench.export().removed  # what the first export wrote, and the second did not
    assert all(path.read_bytes() == b"put here later" for path in theirs)
    assert [path.name for path in bench.out.rglob("*.tar")] == ["mine.tar"]


def test_the_next_export_removes_what_a_killed_one_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = two_shards(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "put", _die)
        with pytest.raises(KeyboardInterrupt):
            bench.export("export.corrected_shards=true")
    written = {path for path in bench.out.rglob("*") if path.is_file()}
    assert len(written) > 4
    manifest = bench.export().manifest
    files = {str(path.relative_to(bench.out)) for path in bench.out.rglob("[!.]*") if path.is_file()}
    assert files == manifest.files() | {"manifest.json"}


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_labels_follow_their_class_names_when_the_list_is_reordered(bench: ExportBench) -> None:
    """Rows 1 and 7 were repaired, from bee to cat and from bee to ant; all others are as given."""
    (bench.folder / "classes.txt").write_text("cat\nant\nbee\n")
    bench.index(label="json:name")
    bench.export()
    exported = {entry["row"]: (entry["given_class"], entry["predicted_class"]) for entry in bench.table()}
    assert {row: classes for row, classes in exported.items() if classes[0] != classes[1]} == {
        1: ("bee", "cat"),
        7: ("bee", "ant"),
    }
    assert bench.export().manifest.class_names == ("cat", "ant", "bee")


def test_labels_of_an_older_class_list_are_exported_with_a_catalogue_of_that_list(
    bench: ExportBench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "classes.txt").write_text("ant\nbee\ncow\n")
    bench.index()
    assert bench.export().manifest.class_names == ("ant", "bee", "cat")
    assert "lacks 'cat' and has in addition 'cow'); using catalogue version 1" in capsys.readouterr().out


def test_labels_of_a_catalogue_that_was_rebuilt_in_another_order_are_refused(tmp_path: Path) -> None:
    bench = ExportBench(tmp_path)
    bench.shard("b.tar", samples(range(6)))
    bench.index()
    catalogue = Catalogue.open(bench.storage)
    start_labels(catalogue, bench.storage, 10.0).save(published_url(bench.storage, "t"))
    fsspec.filesystem("memory").rm(f"{bench.storage}/catalogue".removeprefix("memory:/"), recursive=True)
    bench.shard("a.tar", samples(range(6, 12)))  # now comes first
    bench.index()
    with pytest.raises(PencilError, match="row 0 is a different sample from the one these labels"):
        bench.export()


def test_a_paused_export_publishes_nothing_if_another_one_took_over(
    bench: ExportBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = export_labels._manifest

    def overtaken(*arguments: Any) -> ExportManifest:
        monkeypatch.setattr(export_labels, "_manifest", make)
        (bench.out / ".lease").unlink()  # it expired, and another export took over
        bench.publish({2: 0})
        bench.export()
        return make(*arguments)

    monkeypatch.setattr(export_labels, "_manifest", overtaken)
    with pytest.raises(LeaseLostError):
        bench.export()
    manifest = read_manifest(str(bench.out))
    assert manifest is not None
    assert all((bench.out / file).exists() for file in manifest.files())


@pytest.mark.slow
@pytest.mark.usefixtures("small_label_parts")
def test_labels_are_refused_if_any_rows_of_a_rebuilt_catalogue_were_swapped(tmp_path: Path) -> None:
    bench = ExportBench(tmp_path)
    for number in range(4):  # one label part each
        bench.shard(f"{number}.tar", samples(range(1024 * number, 1024 * number + 1024)))
    bench.index()
    catalogue = Catalogue.open(bench.storage)
    start_labels(catalogue, bench.storage, 10.0).save(published_url(bench.storage, "t"))
    folder = f"{bench.storage}/catalogue".removeprefix("memory:/")
    fsspec.filesystem("memory").rm(folder, recursive=True)
    bench.index()
    bench.export()  # rebuilt, but every row is the same sample
    fsspec.filesystem("memory").rm(folder, recursive=True)
    (tmp_path / "1.tar").rename(tmp_path / "x.tar")
    (tmp_path / "2.tar").rename(tmp_path / "1.tar")
    (tmp_path / "x.tar").rename(tmp_path / "2.tar")
    bench.index()
    with pytest.raises(PencilError, match=r"row 1,024 is a different sample"):
        bench.export()


def test_a_void_pin_does_not_revive_an_older_one(bench: ExportBench) -> None:
    catalogue = Catalogue.open(bench.storage)
    add_pins(bench.storage, pins_of({1: "cat"}))
    pins = read_pins(bench.storage).resolve(catalogue.class_names)
    start_labels(catalogue, bench.storage, 10.0, pins).save(published_url(bench.storage, "t"))
    add_pins(bench.storage, pins_of({1: "dog"}))  # a class that has left the list since
    bench.export()
    exported = bench.table()[1]
    assert (exported["given_class"], exported["predicted_class"], exported["pinned"]) == ("bee", "bee", False)
