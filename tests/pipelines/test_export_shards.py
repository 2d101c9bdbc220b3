"""Corrected shards: the same tars with other labels."""

from pathlib import Path

import pytest
import webdataset
from catalogue_making import image
from export_making import ExportBench, two_shards
from tar_making import END, member

from pencil_scale.export.tar_rewrite import LabelMember, NewLabel, rewrite_shard
from pencil_scale.storage.urls import MemorySource


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    return two_shards(tmp_path)


def test_corrected_shards_differ_only_in_their_labels(bench: ExportBench) -> None:
    originals = {path: path.read_bytes() for path in bench.folder.glob("*.tar")}
    summary = bench.export("export.corrected_shards=true")
    assert summary.num_written("shards") == 2
    assert {path: path.read_bytes() for path in originals} == originals
    (path,) = bench.out.glob("shards/*/00041.tar")
    assert path.read_bytes() == _with_label(originals[bench.folder / "00041.tar"], "000001.cls", b"2")
    found = {each["__key__"]: each for each in webdataset.WebDataset(str(path), shardshuffle=False)}
    assert [each["cls"] for each in found.values()] == [b"0", b"2", b"2", b"0", b"1", b"2"]
    assert found["000001"]["png"] == image(1)
    assert bench.export("export.corrected_shards=true").num_written("shards") == 0


def test_corrected_shards_that_are_no_longer_requested_are_removed_and_reported(
    bench: ExportBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.export("export.corrected_shards=true")
    capsys.readouterr()
    bench.export()
    assert not list(bench.out.glob("shards/*/*.tar"))
    said = " ".join(capsys.readouterr().out.split())
    assert "of corrected shards │ 2; export.corrected_shards=true writes them again" in said


def test_a_new_label_has_the_format_of_the_old_one_and_the_rest_of_the_json_stays(tmp_path: Path) -> None:
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


def test_the_corrected_copy_of_a_damaged_shard_is_intact(bench: ExportBench) -> None:
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


def _with_label(shard: bytes, name: str, label: bytes) -> bytes:
    """Change a label of one character in place: header and padding stay."""
    start = shard.index(name.encode()) + 512
    return shard[:start] + label + shard[start + 1 :]
