"""Corrected shards: the same tars with other labels, which agree in all members of a sample."""

import io
import json
from pathlib import Path

import pytest
import webdataset
from catalogue_making import CLASSES, image
from export_making import ExportBench, two_shards
from tar_making import END, member

from pencil_scale.export.tar_rewrite import LabelMember, NewLabel, rewrite_shard
from pencil_scale.storage.urls import REMOTE, ByteSource, MemorySource


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    return two_shards(tmp_path)


def test_corrected_shards_differ_only_in_their_labels(bench: ExportBench) -> None:
    originals = {path: path.read_bytes() for path in bench.folder.glob("*.tar")}
    summary = bench.export("export.corrected_shards=true")
    assert summary.num_written("shards") == 2
    assert {path: path.read_bytes() for path in originals} == originals
    (path,) = bench.out.glob("shards/*/00041.tar")
    kept = b'"name": "bee", "given_label": 1}'  # `name` is not data.label, and no copy called `label`
    original, found = originals[bench.folder / "00041.tar"], path.read_bytes()
    assert kept in found
    assert found.partition(b"000001.cls")[0] == original.partition(b"000001.cls")[0]
    assert found.partition(b"000002.png")[2] == original.partition(b"000002.png")[2]
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


LABEL = NewLabel(2, "cat", given=1)


@pytest.mark.parametrize(
    ("source", "suffix", "old", "new"),
    [
        ("cls", "cls", b"1\n", b"2"),
        ("txt", "txt", b"bee", b"cat"),
        ("json:label", "cls", b"1", b"2"),
        ("cls", "json", b'{"label": "bee", "n": 7}', b'{"label": "cat", "n": 7, "given_label": "bee"}'),
        ("cls", "json", b'{"label": 1}', b'{"label": 2, "given_label": 1}'),
        ("cls", "json", b'{"url": "x"}', b'{"url": "x", "given_label": 1}'),
        ("cls", "json", b'{"label": "cat"}', b'{"label": "cat"}'),  # agrees already
        ("cls", "json", b"no JSON", b"no JSON"),
        ("json:n", "json", b'{"n": "1"}', b'{"n": "2", "given_label": "1"}'),
        # Corrected before: the first label is the given one.
        ("cls", "json", b'{"label": 0, "given_label": 1}', b'{"label": 2, "given_label": 1}'),
        (
            "json:a.label",
            "json",
            b'{"a": {"label": "bee"}, "url": "\xc3\xa9"}',
            b'{"a": {"label": "cat", "given_label": "bee"}, "url": "\xc3\xa9"}',
        ),
    ],
)
def test_every_member_that_states_the_label_is_replaced_in_its_own_form(
    source: str, suffix: str, old: bytes, new: bytes
) -> None:
    where = LabelMember.of(source)
    assert where.states_label(suffix)
    assert where.replaced(suffix, old, LABEL) == new


def test_classes_whose_names_are_digits_are_written_by_name() -> None:
    """A text is looked up among the names first, so "2" would be read as the class of that name."""
    assert LabelMember.of("txt").replaced("txt", b"2", NewLabel(2, "3", given=1)) == b"3"


@pytest.mark.parametrize("label", ["cls", "json:label"])
def test_a_corrected_shard_has_the_same_labels_whichever_member_is_read(tmp_path: Path, label: str) -> None:
    bench = ExportBench(tmp_path)
    for number in range(6):
        fields = json.dumps({"label": CLASSES[number % 3]}).encode()
        members = [(f"{number}.png", image(number)), (f"{number}.cls", b"%d" % (number % 3))]
        bench.shard(f"{number}.tar", [*members, (f"{number}.json", fields)])
    bench.index(label=label)
    bench.publish({1: 2, 3: 1})
    bench.export("export.corrected_shards=true")
    found = {
        path.stem: next(iter(webdataset.WebDataset(str(path), shardshuffle=False)))
        for path in bench.out.glob("shards/*/*.tar")
    }
    stated = {key: (int(one["cls"]), json.loads(one["json"])) for key, one in found.items()}
    assert all(fields["label"] == CLASSES[number] for number, fields in stated.values())
    assert [stated[key][0] for key in sorted(stated)] == [0, 2, 2, 1, 1, 2]
    given = {key: fields["given_label"] for key, (_, fields) in stated.items() if "given_label" in fields}
    assert given == {"1": "bee", "3": "ant"}


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


def test_a_remote_shard_is_corrected_in_few_large_reads() -> None:
    keys = [f"{number:05d}" for number in range(2_000)]
    shard = b"".join(
        member(f"{key}.png".encode(), b"p" * 20_000) + member(f"{key}.cls".encode(), b"0") for key in keys
    )
    shard += END
    reads: list[int] = []

    def read(start: int, length: int) -> bytes:
        reads.append(length)
        return shard[start : start + length]

    labels = {key: NewLabel(1, "bee") if number % 3 == 0 else None for number, key in enumerate(keys)}
    sinks = io.BytesIO(), io.BytesIO()
    rewrite_shard(
        ByteSource("s3://lake/x.tar", len(shard), read, *REMOTE), sinks[0], labels, LabelMember("cls")
    )
    rewrite_shard(MemorySource(shard), sinks[1], labels, LabelMember("cls"))
    assert sinks[0].getvalue() == sinks[1].getvalue()
    assert sum(reads) == len(shard)  # no byte twice
    assert len(reads) <= len(shard) / 8e6 + 10


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
