"""Ids by every policy, labels from every source, and true classes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalogue_making import CLASSES, Bench, image, sample, samples

from pencil_scale.storage.errors import PencilError


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- identity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("key", ["000001", "000002"]),
        ("shard_key", ["a/000001", "a/000002"]),
        ("json:url", ["https://x/1", "https://x/2"]),
    ],
)
def test_ids_come_from_the_policy(bench: Bench, identity: str, expected: list[str]) -> None:
    bench.shard("a.tar", samples([1, 2]))
    assert [row["sample_id"] for row in bench.rows(bench.index(identity=identity))] == expected


def test_the_content_hash_names_a_sample_by_its_bytes(bench: Bench) -> None:
    import hashlib

    bench.shard("a.tar", [*sample(1), *sample(1, key="again"), *sample(2)])
    summary = bench.index(identity="sha256")
    expected = [hashlib.sha256(image(number)).hexdigest() for number in (1, 2)]
    assert [row["sample_id"] for row in bench.rows(summary)] == expected
    assert summary.catalogue.manifest["num_duplicates"] == 1


def test_the_identity_of_an_existing_catalogue_cannot_change(bench: Bench) -> None:
    bench.shard("a.tar", samples([1, 2]))
    bench.index()
    with pytest.raises(PencilError, match="row numbers are permanent"):
        bench.index(identity="sha256")


def test_shard_key_refuses_two_shards_with_the_same_name(bench: Bench, tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        bench.shard(f"{folder}/a.tar", samples([1]))
    with pytest.raises(PencilError, match=r"two shards are called a\.tar"):
        bench.index(shards=f"{tmp_path}/{{x,y}}/a.tar", identity="shard_key")


# -- labels -------------------------------------------------------------------------------------------


def test_labels_come_from_every_source_the_config_can_name(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", [*samples(range(3)), ("t.png", image(9)), ("t.txt", b"cat\n"), ("t.json", b"{}")])
    ids = [f"{number:06d}" for number in range(3)]
    pq.write_table(pa.table({"id": ids, "label": CLASSES}), tmp_path / "labels.parquet")
    (tmp_path / "labels.csv").write_text(
        "id,label\n" + "\n".join(map(",".join, zip(ids, CLASSES, strict=True)))
    )
    lines = [f"./{key}.png {number}" for number, key in enumerate(ids)]
    (tmp_path / "kv.txt").write_text("\n".join(lines) + "\n")
    for label in ("cls", "json:name", f"file:{tmp_path}/kv.txt", f"table:{tmp_path}/labels.parquet#id,label"):
        summary = bench.index(label=label)
        assert [row["noisy_class"] for row in bench.rows(summary)] == [0, 1, 2, None]
        assert summary.catalogue.manifest["status"] == {"ok": 3, "unlabelled": 1}
    summary = bench.index(label=f"table:{tmp_path}/labels.csv#id,label")
    assert summary.catalogue.num_ok == 3
    summary = bench.index(label="txt")
    assert [row["noisy_class"] for row in bench.rows(summary)] == [None, None, None, 2]


def test_a_label_is_an_alias_a_name_or_a_number_and_others_are_listed(bench: Bench, tmp_path: Path) -> None:
    raws = ["bee", "Bienen", "2", "wasp", "wasp", "moth", "", "ant\ncat", "bee\nBienen", "99"]
    members = [
        (f"{n}.{s}", d) for n, raw in enumerate(raws) for s, d in (("png", image(n)), ("txt", raw.encode()))
    ]
    bench.shard("a.tar", members)
    (tmp_path / "aliases.tsv").write_text("Bienen\tbee\nmoth\tant\n")
    summary = bench.index(label="txt", aliases=f"{tmp_path}/aliases.tsv")
    expected = [
        "ok",
        "ok",
        "ok",
        "unknown_class",
        "unknown_class",
        "ok",
        "unlabelled",
        "several_labels",
        "ok",
    ]
    rows = bench.rows(summary)
    assert [row["status"] for row in rows] == [*expected, "label_out_of_range"]
    assert [row["noisy_class"] for row in rows] == [1, 1, 2, None, None, 0, None, None, 1, None]
    assert summary.catalogue.manifest["unknown_labels"] == {"wasp": 2}


def test_an_alias_for_an_unknown_class_is_an_error_that_quotes_its_line(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", samples([1]))
    (tmp_path / "aliases.tsv").write_text("Bienen\tbee\nMotte\tmoth\n")
    with pytest.raises(PencilError, match=r"line 2 is 'Motte\\tmoth'"):
        bench.index(aliases=f"{tmp_path}/aliases.tsv")


def test_lines_that_disagree_are_several_labels(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", samples([1, 2]))
    (tmp_path / "kv.txt").write_text("000001 0\n000001 2\n000002 1\n000002 bee\n")
    rows = bench.rows(bench.index(label=f"file:{tmp_path}/kv.txt"))
    assert [(row["status"], row["noisy_class"]) for row in rows] == [("several_labels", None), ("ok", 1)]


def test_truth_is_stored_next_to_the_given_class_and_counted(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", samples(range(6)))
    pq.write_table(pa.table({"id": ["000001", "000002"], "is": ["bee", "ant"]}), tmp_path / "truth.parquet")
    summary = bench.index(truth=f"{tmp_path}/truth.parquet#id,is")
    assert [row["true_class"] for row in bench.rows(summary)] == [None, 1, 0, None, None, None]
    assert summary.catalogue.manifest["truth"] == {"num_known": 2, "num_wrong": 1, "mostly": {}}


def test_truth_can_be_read_from_json_and_an_invalid_one_is_ignored(bench: Bench) -> None:
    fields = [b'{"true": "cat"}', b'{"true": 9}', b"{}", b"broken"]
    members = [
        (f"{number}.{suffix}", data)
        for number, raw in enumerate(fields)
        for suffix, data in (("png", image(number)), ("cls", b"1"), ("json", raw))
    ]
    bench.shard("a.tar", members)
    summary = bench.index(truth="json:true")
    assert [row["true_class"] for row in bench.rows(summary)] == [2, None, None, None]
    assert summary.catalogue.num_ok == 4


def test_changed_labels_are_read_again_under_the_same_rows(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", samples(range(3)))
    labels = tmp_path / "kv.txt"
    labels.write_text("000000 0\n000001 0\n000002 0\n")
    bench.index(label=f"file:{labels}")
    labels.write_text("000000 0\n000001 1\n000002 2 \n")
    summary = bench.index(label=f"file:{labels}")
    assert [(row["row"], row["noisy_class"]) for row in bench.rows(summary)] == [(0, 0), (1, 1), (2, 2)]
