"""How the catalogue reports damage: where it is, what was found, what to do; and rows after lost bytes."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue_making import Bench, accounted_for, image, sample, samples
from tar_making import BLOCK, END, block, member, pax, python_tar
from tar_reading import keys, kinds

from pencil_scale.catalogue.ranges import locate_samples, read_samples
from pencil_scale.catalogue.report import alarms, summary_page, summary_text
from pencil_scale.export.tar_rewrite import LabelMember, NewLabel, rewrite_shard
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import MemorySource

MEMBERS = samples(range(20))
TAR = python_tar(MEMBERS)
SAMPLE = 6 * BLOCK  # every member here takes two blocks
PLACE = 10 * SAMPLE  # where sample 10 starts, with its image


def shifted() -> bytes:
    """Three bytes more in the image of sample 10, five less in the padding of sample 15's."""
    first, second = PLACE + BLOCK + 20, 15 * SAMPLE + 2 * BLOCK - 100
    return TAR[:first] + b"abc" + TAR[first:second] + TAR[second + 5 :]


def test_rows_after_lost_bytes_have_the_shifted_offsets_of_their_images(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(shifted())
    summary = bench.index()
    manifest = summary.catalogue.manifest
    assert manifest["status"] == {"ok": 19, "cut": 1}
    assert manifest["damage"] == {"shifted_bytes": 2}
    rows = [row for row in bench.rows(summary) if row["status"] == "ok"]
    assert {row["image_offset"] % BLOCK for row in rows} == {0, 3, BLOCK - 2}
    for row in rows:
        first = row["image_offset"]
        assert shifted()[first : first + row["image_bytes"]] == image(row["row"])


def test_samples_after_lost_bytes_are_read_completely(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(shifted())
    catalogue = bench.index().catalogue
    rows = np.array([row for row in range(20) if row != 10])
    found = dict(read_samples(catalogue, locate_samples(catalogue, rows)))
    assert found == {f"{row:06d}": sample(row) for row in rows.tolist()}


def test_rewriting_a_shard_restores_its_padding() -> None:
    sink = io.BytesIO()
    labels = {f"{number:06d}": NewLabel(2, "cat") if number == 16 else None for number in range(20)}
    rewrite_shard(MemorySource(shifted()), sink, labels, LabelMember("cls"))
    written = sink.getvalue()
    assert kinds(written) == []
    assert keys(written) == list(labels)
    assert len(written) % BLOCK == 0


FOUND: dict[str, tuple[bytes, int, str]] = {
    "keys apart": (python_tar([*MEMBERS, ("000003.txt", b"1")]), 20 * SAMPLE, "tar --sort=name"),
    "a key twice": (python_tar([*MEMBERS, *sample(3)]), 20 * SAMPLE, "unique keys"),
    "no key": (python_tar([*MEMBERS, (".jpg", image(1))]), 20 * SAMPLE, "names such as 000123.jpg"),
    "no header": (TAR[:PLACE] + b"\xa5" * BLOCK + TAR[PLACE + BLOCK :], PLACE, "fetch the shard again"),
    "a flipped bit": (
        TAR[: PLACE + 130] + b"\x31" + TAR[PLACE + 131 :],
        PLACE,
        "its name looks like '000010.png'; fetch the shard again",
    ),
    "no header at all": (b"\xa5" * 3000, 0, "take it off data.shards"),
    "a gzip": (b"\x1f\x8b" * 1000, 0, "gzip data"),
    "ends in a header": (TAR[: PLACE + 100], PLACE, "100 bytes into its 512; fetch the shard again"),
    "ends in data": (TAR[: PLACE + BLOCK + 5], PLACE, "of which 5 are there; fetch the shard again"),
    "ends after a pax header": (
        TAR[:PLACE] + pax({b"path": b"a.jpg"}),
        PLACE,
        "before its member; fetch the shard",
    ),
    "bytes lost": (TAR[: PLACE + BLOCK + 9] + TAR[PLACE + BLOCK + 12 :], PLACE, "3 bytes before its place"),
    "no end": (TAR[:PLACE], PLACE, "if its writer ends every shard like this, nothing is lost"),
    "uneven": (TAR[:-1], 20 * SAMPLE, "fetch the shard again"),
    "empty": (b"", 0, "fetch the shard again"),
    "no sample": (END, 0, "take it off data.shards"),
    "wiped": (TAR[:PLACE] + bytes(SAMPLE) + TAR[PLACE + SAMPLE :], PLACE, "tar -A"),
    "huge name": (
        TAR[:PLACE] + member(b"L", b"n" * (2 << 20), b"L") + block(b"x.jpg", 0) + END,
        PLACE,
        "an attack or a writer's error",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_damage_is_reported_with_its_shard_its_byte_and_what_to_do(tmp_path: Path, name: str) -> None:
    data, place, action = FOUND[name]
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(data)
    bench.shard("b.tar", samples(range(90, 93)))  # a catalogue without usable samples is refused
    summary = bench.index()
    (found,) = summary.catalogue.damage().to_pylist()
    assert found["detail"].startswith(f"shard {tmp_path}/a.tar at byte {place:,}: ")
    assert action in found["detail"]
    assert found["start"] == place
    assert accounted_for(summary) == summary.catalogue.manifest["num_samples"]


def test_a_listed_shard_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("0.tar", MEMBERS)
    (found,) = bench.index(shards=f"{tmp_path}/{{0..1}}.tar").catalogue.damage().to_pylist()
    assert f"{tmp_path}/1.tar" in found["detail"]
    assert "fetch it, or take it off data.shards" in found["detail"]


def test_images_without_a_key_are_lost_samples_and_count_as_damage(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    nameless = [(".jpg", image(1)), (".cls", b"1"), (".hidden.jpg", image(2)), ("README", b"text")]
    bench.shard("a.tar", [*MEMBERS, *nameless])
    summary = bench.index()
    manifest: dict[str, Any] = summary.catalogue.manifest
    assert manifest["damage"] == {"no_key": 4}
    assert (manifest["num_samples"], manifest["num_lost_samples"]) == (22, 2)
    assert summary.catalogue.damage()["key"].to_pylist() == [name for name, _ in nameless]
    assert accounted_for(summary) == 22


def test_a_garbled_tail_is_reported_once_without_a_missing_end_marker(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(TAR[:PLACE] + b"\xa5" * 9000)
    assert bench.index().catalogue.manifest["damage"] == {"damaged_header": 1}
    (tmp_path / "a.tar").write_bytes(TAR[: PLACE + BLOCK + 5])
    assert bench.index().catalogue.manifest["damage"] == {"cut_short": 1}


def test_the_summary_gives_advice_a_place_and_an_example_of_a_missing_label(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "labels.csv").write_text("id,label\na/000001.png,ant\ngood,bee\n")
    bench.shard("a.tar", [*samples(range(4)), ("x.png", b"text"), ("good.png", image(5))])
    catalogue = bench.index(label=f"table:{tmp_path}/labels.csv#id,label").catalogue
    text = summary_text(catalogue, "training")
    (alarm,) = alarms(catalogue.manifest)
    assert alarm.startswith("4 of 6 samples have no label, for example '000000'")
    assert "image_unreadable  1: the image does not decode; fetch it again" in text
    assert text.endswith("summary.html")
    page = summary_page(catalogue)
    place = catalogue.read(4, 5, ["image_offset"])["image_offset"][0].as_py()
    assert f"a.tar at byte {place:,}: the image does not decode" in page


def test_labels_that_are_not_utf8_are_shown_as_escaped_bytes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", [("a.png", image(1)), ("a.cls", b"\xff\xfe"), *MEMBERS])
    assert bench.index().catalogue.manifest["unknown_labels"] == {r"\xff\xfe": 1}


def test_a_refusal_names_the_first_damage_of_the_worst_shard(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(TAR[: PLACE + BLOCK + 5])
    place = rf"a\.tar at byte {PLACE:,}: a member of \d+ bytes, of which 5 are there; fetch the shard again"
    with pytest.raises(PencilError, match=rf"{place}; mend this, or raise data\.max_damaged_share"):
        bench.index(max_damaged_share=0.01)
