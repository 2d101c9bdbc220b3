"""Exports opened with other tools."""

import json
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalogue_making import CLASSES
from export_making import ExportBench, two_shards


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    return two_shards(tmp_path)


def test_the_files_state_that_epochs_count_from_0(bench: ExportBench) -> None:
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
    exported = bench.table()
    shares = np.zeros((12, 3))
    for row, each in enumerate(exported):
        shares[row, each["top_labels"]] = each["top_shares"]
    given = np.array([each["given_label"] for each in exported])
    expected = rank.get_self_confidence_for_each_label(given, shares)
    np.testing.assert_allclose([each["label_score"] for each in exported], expected, atol=1e-6)
    issues = rank.order_label_issues(np.array([each["is_label_issue"] for each in exported]), given, shares)
    assert sorted(issues) == [1, 7]
