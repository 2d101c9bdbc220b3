"""Exports: opened with tools that know nothing of us, and holding exactly what may be told."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from catalogue_making import CLASSES, Bench, image, sample, samples
from tar_making import END, member

from pencil_scale.backbones import build_backbone
from pencil_scale.catalogue import Catalogue
from pencil_scale.config import load_config
from pencil_scale.export_files import ExportError, read_manifest
from pencil_scale.label_table import LabelTable
from pencil_scale.labels.label_report import HISTORY
from pencil_scale.labels.label_study import history_folder
from pencil_scale.labels.published import published_url
from pencil_scale.labels.start_labels import label_store
from pencil_scale.reading.byte_source import MemorySource
from pencil_scale.reading.tar_rewrite import LabelMember, NewLabel, rewrite_shard
from pipelines.export_labels import Summary, run


class ExportBench(Bench):
    """A catalogue with published labels; exports go to a real folder, where other tools can open them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.out = folder / "out"

    def publish(self, corrected: dict[int, int], visited: Sequence[int] | None = None) -> None:
        """Publish labels in which these rows have moved to other classes, with 0.8 of their mass."""
        catalogue = Catalogue.open(self.storage)
        given = catalogue.read(0, catalogue.num_rows)["noisy_class"].fill_null(-1).to_numpy()
        table = LabelTable.create(self.folder / f"table-{len(list(self.folder.iterdir()))}", given, 3)
        rows = np.arange(len(given)) if visited is None else np.array(visited)
        wanted = np.array([corrected.get(row, max(given[row], 0)) for row in rows])
        shares = np.full((len(rows), 3), 0.1)
        shares[np.arange(len(rows)), wanted] = 0.8
        table.write(rows, np.log(shares), epoch=0)
        table.snapshot(label_store(self.storage)).save(published_url(self.storage, "t"))

    def export(self, *overrides: str, predict: bool = False) -> Summary:
        keys = [f"export.folder={self.out}", f"export.predict={str(predict).lower()}", "images.crop=4"]
        return run(load_config(self.folder / "config.yaml", [*keys, *overrides]))

    def table(self) -> list[dict[str, Any]]:
        return pa.concat_tables(pq.read_table(path) for path in sorted(self.out.glob("table/*"))).to_pylist()

    def sidecar(self, name: str) -> list[dict[str, Any]]:
        (path,) = self.out.glob(f"sidecars/*/{name}.labels.parquet")
        return pq.read_table(path).to_pylist()

    def write_times(self, kind: str) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.out.glob(f"{kind}/*/*")}


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    found = ExportBench(tmp_path)
    found.shard("00041.tar", samples(range(6)))  # classes 0, 1, 2 in turn
    found.shard("00042.tar", samples(range(6, 12)))
    found.index()
    found.publish({1: 2, 7: 0})
    return found


def test_a_sample_is_told_in_cleanlabs_words_with_all_that_is_known(bench: ExportBench) -> None:
    bench.export()
    told = bench.sidecar("00041")[1]
    shares = told.pop("top_shares")
    scores = [told.pop(name) for name in ("label_score", "confidence", "margin")]
    assert told == {
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
        "last_change_epoch": None,
        "pinned": False,
        "status": "ok",
        "predicted_by": "labels",
        "catalogue_version": 1,
        "model_version": "t",
    }
    np.testing.assert_allclose(scores, [0.1, 0.8, 0.7], atol=1e-6)
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=1e-6)
    assert [told["is_label_issue"] for told in bench.table()] == [row in (1, 7) for row in range(12)]


def test_only_sidecars_of_shards_whose_labels_changed_are_written_again(bench: ExportBench) -> None:
    assert bench.export().num_sidecars_written == 2
    before = bench.write_times("sidecars")
    again = bench.export()
    assert (again.num_sidecars_written, again.num_table_written, again.swept) == (0, 0, ())
    bench.publish({1: 2, 7: 1})
    third = bench.export()
    assert third.num_sidecars_written == 1
    after = bench.write_times("sidecars")
    assert after["00041.labels.parquet"] == before["00041.labels.parquet"]
    assert after["00042.labels.parquet"] > before["00042.labels.parquet"]
    assert len(after) == 2  # what is outdated is gone


def test_excluded_ids_appear_in_no_file_not_even_an_older_one(bench: ExportBench) -> None:
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


def test_a_duplicate_stands_in_its_own_shards_sidecar_with_its_own_given_label(bench: ExportBench) -> None:
    bench.shard("00043.tar", sample(1, label=0))
    bench.index()
    bench.export()
    (told,) = bench.sidecar("00043")
    assert (told["row"], told["status"], told["given_label"], told["predicted_label"]) == (
        1,
        "duplicate",
        0,
        2,
    )
    assert told["label_score"] == pytest.approx(0.1)
    assert told["is_label_issue"]
    assert len(bench.table()) == 12


def test_unlabelled_samples_get_the_models_prediction(bench: ExportBench) -> None:
    bench.shard(
        "00043.tar", [("x.png", image(77)), ("y.png", b"no image"), ("z.png", image(9)), ("z.cls", b"9")]
    )
    bench.index()
    bench.publish({})
    torch.manual_seed(0)
    model = build_backbone("small_convnet", 3).eval()
    import fsspec

    with fsspec.open(f"{bench.storage}/models/t.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    summary = bench.export(predict=True)
    told = {each["key"]: each for each in bench.sidecar("00043")}
    assert summary.predicted_by == {"labels": 12, "model": 2, "nobody": 1}
    assert told["y"]["predicted_label"] is None
    assert told["x"]["given_label"] is None
    assert told["x"]["label_score"] is None
    assert (told["x"]["predicted_by"], told["x"]["is_label_issue"]) == ("model", False)
    config = load_config(bench.folder / "config.yaml", ["images.crop=4"])
    pixels = torch.tensor([77, 0, 7]) / 255
    colour = (pixels - torch.tensor(config.images.mean)) / torch.tensor(config.images.std)
    shares = model(colour[:, None, None].expand(1, 3, 4, 4)).softmax(-1)[0].detach()
    assert told["x"]["predicted_label"] == int(shares.argmax())
    assert told["x"]["confidence"] == pytest.approx(float(shares.max()), abs=1e-5)


def test_without_a_model_it_says_so_before_it_writes(bench: ExportBench) -> None:
    with pytest.raises(ExportError, match=r"no model .*/models/t.pt .*; set export.predict=false"):
        bench.export(predict=True)
    assert not bench.out.exists()


def test_labels_nobody_visited_and_rows_newer_than_the_labels_are_told_as_given(bench: ExportBench) -> None:
    bench.publish({1: 2}, visited=[0, 1, 2])
    bench.shard("00043.tar", samples([12]))
    bench.index()
    bench.export()
    told = bench.table()
    assert [each["predicted_by"] for each in told] == ["labels"] * 3 + ["given"] * 10
    assert told[5]["predicted_label"] == told[5]["given_label"] == 2
    assert told[5]["confidence"] is None
    assert not any(each["is_label_issue"] for each in told[3:])


def test_the_epoch_of_the_last_change_is_read_from_the_history(bench: ExportBench) -> None:
    import fsspec

    given = np.arange(12) % 3
    for epoch, row_one in ((4, 0), (5, 2), (7, 2)):
        now = np.where(np.arange(12) == 1, row_one, given).astype(np.uint16)
        url = f"{history_folder(bench.storage, 't')}/epoch-{epoch:05d}.arrow"
        with fsspec.open(url, "wb") as file, pa.ipc.new_file(file, HISTORY) as writer:
            writer.write_batch(
                pa.record_batch([pa.array(now), pa.array(np.ones(12, np.float16))], schema=HISTORY)
            )
    bench.export()
    assert [each["last_change_epoch"] for each in bench.table()] == [None, 5] + [None] * 10


def test_a_sample_that_nobody_trained_on_never_changed_whatever_class_its_history_has(
    tmp_path: Path,
) -> None:
    import fsspec

    bench = ExportBench(tmp_path)
    bench.shard("a.tar", [*samples(range(3)), ("bare.png", image(9))])
    bench.index()
    bench.publish({}, visited=range(3))
    now = np.array([0, 1, 2, 0], np.uint16)  # a table has some class for every row
    url = f"{history_folder(bench.storage, 't')}/epoch-00008.arrow"
    with fsspec.open(url, "wb", auto_mkdir=True) as file, pa.ipc.new_file(file, HISTORY) as writer:
        writer.write_batch(pa.record_batch([pa.array(now), pa.array(np.ones(4, np.float16))], schema=HISTORY))
    bench.export()
    assert [(each["given_label"], each["last_change_epoch"]) for each in bench.table()] == [
        (0, None),
        (1, None),
        (2, None),
        (None, None),
    ]


def test_the_files_say_that_epochs_count_from_0(bench: ExportBench) -> None:
    bench.export()
    field = pq.read_schema(next(bench.out.glob("table/*"))).field("last_change_epoch")
    assert b"counted from 0" in field.metadata[b"description"]


def test_duckdb_and_polars_read_the_table(bench: ExportBench) -> None:
    bench.export()
    files = str(bench.out / "table" / "*.parquet")
    query = f"select given_class, predicted_class, count(*) from '{files}' where is_label_issue group by all"
    assert sorted(duckdb.sql(query).fetchall()) == [("bee", "ant", 1), ("bee", "cat", 1)]
    frame = polars.read_parquet(files).filter(polars.col("label_score") < 0.5)
    assert sorted(frame["sample_id"]) == ["000001", "000007"]
    assert frame["top_shares"].list.sum().to_list() == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_hugging_face_reads_labels_as_class_labels(bench: ExportBench) -> None:
    datasets = pytest.importorskip("datasets")
    bench.export()
    files = [str(path) for path in bench.out.glob("table/*.parquet")]
    data = datasets.Dataset.from_parquet(files, cache_dir=str(bench.folder / "cache"))
    for name in ("given_label", "predicted_label"):
        assert data.features[name] == datasets.ClassLabel(names=CLASSES)
    assert data.features["given_label"].int2str(data[1]["given_label"]) == "bee"


def test_the_files_carry_hugging_faces_features_for_int64_labels(bench: ExportBench) -> None:
    bench.export()
    (path,) = bench.out.glob("table/*.parquet")
    schema = pq.read_schema(path)
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["given_label"] == {"names": CLASSES, "_type": "ClassLabel"}
    assert schema.field("given_label") == pa.field("given_label", pa.int64())


@pytest.mark.slow
def test_the_score_is_cleanlabs_self_confidence(bench: ExportBench) -> None:
    rank = pytest.importorskip("cleanlab.rank")
    bench.export("export.top_k=3")
    told = bench.table()
    shares = np.zeros((12, 3))
    for row, each in enumerate(told):
        shares[row, each["top_labels"]] = each["top_shares"]
    given = np.array([each["given_label"] for each in told])
    expected = rank.get_self_confidence_for_each_label(given, shares)
    np.testing.assert_allclose([each["label_score"] for each in told], expected, atol=1e-6)
    issues = rank.order_label_issues(np.array([each["is_label_issue"] for each in told]), given, shares)
    assert sorted(issues) == [1, 7]


def test_corrected_shards_differ_in_their_labels_alone(bench: ExportBench) -> None:
    originals = {path: path.read_bytes() for path in bench.folder.glob("*.tar")}
    summary = bench.export("export.corrected_shards=true")
    assert summary.num_shards_written == 2
    assert {path: path.read_bytes() for path in originals} == originals
    (path,) = bench.out.glob("shards/*/00041.tar")
    assert path.read_bytes() == _with_label(originals[bench.folder / "00041.tar"], "000001.cls", b"2")
    found = {each["__key__"]: each for each in webdataset.WebDataset(str(path), shardshuffle=False)}
    assert [each["cls"] for each in found.values()] == [b"0", b"2", b"2", b"0", b"1", b"2"]
    assert found["000001"]["png"] == image(1)
    assert bench.export("export.corrected_shards=true").num_shards_written == 0


def test_corrected_shards_that_nobody_asked_for_again_are_removed_with_a_word(
    bench: ExportBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.export("export.corrected_shards=true")
    capsys.readouterr()
    bench.export()
    assert not list(bench.out.glob("shards/*/*.tar"))
    said = " ".join(capsys.readouterr().out.split())
    assert "of corrected shards │ 2; export.corrected_shards=true writes them anew" in said


def test_a_label_is_spelled_as_it_was_and_the_rest_of_its_json_stays(tmp_path: Path) -> None:
    label = NewLabel(2, "cat")
    assert LabelMember.of("cls").replaced(b"1\n", label) == b"2"
    assert LabelMember.of("txt").replaced(b"bee", label) == b"cat"
    fields = b'{"a": {"label": "bee"}, "url": "\xc3\xa9"}'
    assert (
        LabelMember.of("json:a.label").replaced(fields, label)
        == b'{"a": {"label": "cat"}, "url": "\xc3\xa9"}'
    )
    assert LabelMember.of("json:n").replaced(b'{"n": 1}', label) == b'{"n": 2}'


def test_labels_from_a_file_beside_the_shards_become_members(bench: ExportBench) -> None:
    shard = member(b"a.png", b"A") + member(b"b.png", b"B") + member(b"c.png", b"C") + END
    sink = (bench.folder / "new.tar").open("wb")
    with sink:
        labels = {"a": NewLabel(1, "bee"), "c": None}
        found = rewrite_shard(MemorySource(shard), sink, labels, LabelMember.of("file:kv.txt"))
    assert (found.num_replaced, found.num_left_out) == (1, 1)
    read = list(webdataset.WebDataset(str(bench.folder / "new.tar"), shardshuffle=False))
    assert [(each["__key__"], each["png"], each.get("cls")) for each in read] == [
        ("a", b"A", b"1"),
        ("c", b"C", None),
    ]


def test_a_damaged_shard_is_corrected_to_a_sound_one(bench: ExportBench) -> None:
    shard = member(b"a.png", b"A") + member(b"a.cls", b"0") + b"\x07" * 512 + member(b"b.png", b"B")
    path = bench.folder / "new.tar"
    with path.open("wb") as sink:
        found = rewrite_shard(
            MemorySource(shard), sink, {"a": NewLabel(12, "x"), "b": None}, LabelMember("cls")
        )
    assert found.num_damaged == 1
    assert path.read_bytes() == b"".join(
        [member(b"a.png", b"A"), member(b"a.cls", b"12"), member(b"b.png", b"B"), END]
    )


def test_the_manifest_names_every_file_that_is_there(bench: ExportBench) -> None:
    summary = bench.export("export.corrected_shards=true")
    manifest = read_manifest(str(bench.out))
    assert manifest == summary.manifest
    there = {str(path.relative_to(bench.out)) for path in bench.out.rglob("*") if path.is_file()}
    assert there == manifest.files() | {"manifest.json"}
    assert (manifest.num_samples, manifest.num_label_issues) == (12, 2)


@pytest.mark.ray
def test_on_a_cluster_the_files_are_those_made_here(tmp_path: Path, ray_session: None) -> None:
    bench = ExportBench(tmp_path)
    for number in range(20):
        bench.shard(f"{number:05d}.tar", samples(range(3 * number, 3 * number + 3)))
    bench.index()
    bench.publish({1: 2})
    here = {path.name: path.read_bytes() for path in _files(bench)}
    bench.storage, bench.out = str(tmp_path / "lake"), tmp_path / "cluster"
    bench.index()
    bench.publish({1: 2})
    assert {path.name: path.read_bytes() for path in _files(bench)} == here


def _files(bench: ExportBench) -> list[Path]:
    bench.export("export.corrected_shards=true")
    return [path for path in bench.out.rglob("*") if path.is_file() and path.name != "manifest.json"]


def _holding(folder: Path, text: bytes) -> list[Path]:
    """Files that tell this text, Parquet looked into."""
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


def _with_label(shard: bytes, name: str, label: bytes) -> bytes:
    """Change a label of one character in place: header and padding stay."""
    place = shard.index(name.encode()) + 512
    return shard[:place] + label + shard[place + 1 :]
