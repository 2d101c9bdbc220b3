"""Every kind of damage a shard can have: it is named and counted, and no sample is lost silently."""

import io
import json
import re
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from catalogue_making import Bench, accounted_for, image, sample, samples
from PIL import Image
from tar_making import BLOCK, END, block, member, pax, python_tar

from pencil_scale.catalogue.report import alarms, notes
from pencil_scale.catalogue.schema import ADVICE, DAMAGE_KINDS, DAMAGED_STATUSES, OTHER_STATUSES
from pencil_scale.images.inspect import ImageFacts, inspect_image
from pencil_scale.storage.errors import PencilError

GOOD = samples(range(20))
TAR = python_tar(GOOD)
NEXT = 60 * BLOCK * 2  # where member number 60 would start: every member here takes two blocks


def bomb() -> bytes:
    data = bytearray(image(1))
    data[16:24] = (100_000).to_bytes(4, "big") * 2  # IHDR's width and height
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def with_members(*extra: tuple[str, bytes]) -> bytes:
    return python_tar([*GOOD, *extra])


HEADER = 30 * 2 * BLOCK  # the header of sample 10's image
CASES = {
    "cut at a boundary": (TAR[:HEADER], "odd_end"),
    "cut in a header": (TAR[: HEADER + 100], "cut_short"),
    "cut in data": (TAR[: HEADER + BLOCK + 5], "cut_short"),
    "garbled header": (TAR[:HEADER] + b"\xa5" * BLOCK + TAR[HEADER + BLOCK :], "damaged_header"),
    "zeroed header": (TAR[:HEADER] + bytes(BLOCK) + TAR[HEADER + BLOCK :], "damaged_header"),
    "no end marker": (TAR[:NEXT], "odd_end"),
    "image member missing": (with_members(("x.cls", b"1")), "image_missing"),
    "two members of one name": (with_members(("x.png", b"1"), ("x.png", b"2")), "repeated_member"),
    "keys apart": (with_members(("000003.txt", b"1")), "key_not_contiguous"),
    "a key twice": (with_members(*sample(3)), "key_repeated"),
    "label out of range": (with_members(*sample(77, label=3)), "label_out_of_range"),
    "negative label": (with_members(("x.png", image(1)), ("x.cls", b"-1")), "label_out_of_range"),
    "label no number": (with_members(("x.png", image(1)), ("x.cls", b"\xff\xfe")), "label_not_a_number"),
    "no label": (with_members(("x.png", image(1))), "unlabelled"),
    "empty image": (with_members(("x.png", b""), ("x.cls", b"1")), "image_empty"),
    "no image in it": (with_members(("x.png", b"text"), ("x.cls", b"1")), "image_unreadable"),
    "bomb": (with_members(("x.png", bomb()), ("x.cls", b"1")), "image_bomb"),
    "two images": (with_members(("x.png", image(1)), ("x.jpg", image(2)), ("x.cls", b"1")), "several_images"),
    "joined archives": (TAR + python_tar(sample(50)), "data_after_end"),
    "garbage after the end": (TAR + b"garbage", "data_after_end"),
    "link": (TAR[:NEXT] + block(b"x.png", 0, b"2") + member(b"x.cls", b"1") + END, "link_member"),
    "sparse": (TAR[:NEXT] + member(b"x.png", image(1), b"S") + member(b"x.cls", b"1") + END, "sparse_member"),
    "bad pax": (TAR[:NEXT] + member(b"p", b"zz", b"x") + member(b"x.png", b"1") + END, "damaged_header"),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_and_every_sample_is_accounted_for(tmp_path: Path, name: str) -> None:
    data, word = CASES[name]
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(data)
    summary = bench.index()
    manifest = summary.catalogue.manifest
    assert manifest["status"].get(word, 0) + manifest["damage"].get(word, 0) == 1
    assert accounted_for(summary) == manifest["num_samples"]
    assert sum(manifest["status"].values()) == manifest["num_rows"]
    assert manifest["num_ok"] >= 9
    keys = {row["key"] for row in bench.rows(summary)}
    cut = min(len(data), NEXT) // (6 * BLOCK)
    assert keys >= {f"{number:06d}" for number in range(cut)}


def test_every_status_and_kind_of_damage_has_advice_that_starts_with_what_to_do() -> None:
    verbs = ("fetch", "take it off", "write", "mend", "report")
    assert all(advice.startswith(verbs) for advice in DAMAGE_KINDS.values())
    assert not set(OTHER_STATUSES) & set(DAMAGED_STATUSES)
    assert all(ADVICE.values())
    assert all(word in ADVICE for _, word in CASES.values())


@pytest.mark.parametrize(
    ("data", "word"), [(b"", "not_a_tar"), (b"<html>" * 99, "not_a_tar"), (END, "no_samples")]
)
def test_an_empty_shard_among_intact_ones_is_reported(tmp_path: Path, data: bytes, word: str) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", GOOD)
    (tmp_path / "b.tar").write_bytes(data)
    summary = bench.index()
    assert summary.catalogue.manifest["damage"] == {word: 1}
    assert summary.catalogue.num_ok == 20
    damage = summary.catalogue.damage().to_pylist()[0]
    assert summary.catalogue.shards[damage["shard"]].url.endswith("b.tar")


def test_damage_has_its_shard_its_bytes_and_its_key(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(CASES["a key twice"][0])
    (entry,) = bench.index().catalogue.damage().to_pylist()
    assert (entry["shard"], entry["start"], entry["kind"], entry["key"]) == (
        0,
        NEXT,
        "key_repeated",
        "000003",
    )
    assert entry["num_samples"] == 1


def test_a_sample_next_to_damage_is_cut_only_if_a_member_is_missing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(CASES["garbled header"][0])
    status = {row["key"]: row["status"] for row in bench.rows(bench.index())}
    assert (status["000009"], status["000010"], status["000011"]) == ("ok", "cut", "ok")


def test_a_pickle_is_counted_and_never_loaded(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    bench = Bench(tmp_path)
    bench.shard("a.tar", [*sample(1), ("000001.pyd", pickle.dumps(Bomb()))])
    summary = bench.index()
    assert summary.catalogue.manifest["oddities"] == {"pickle_member": 1}
    assert summary.catalogue.num_ok == 1
    assert not (tmp_path / "ran").exists()


def test_odd_but_usable_images_are_ok_and_counted(tmp_path: Path) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(deep, "PNG")
    moving = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    intact = image(3, "JPEG", size=64)
    odd = {
        "cmyk.jpg": image(1, "JPEG", "CMYK"),
        "deep.png": deep.getvalue(),
        "palette.png": image(1, "PNG", "P"),
        "moving.gif": moving.getvalue(),
        "dot.png": image(1, size=1),
        "short.jpg": intact[: len(intact) - 20],
    }
    bench = Bench(tmp_path)
    bench.shard(
        "a.tar", [pair for name, data in odd.items() for pair in ((name, data), (name[:-4] + ".cls", b"1"))]
    )
    for check in ("header", "decode"):
        summary = bench.index(check_images=check)
        assert summary.catalogue.num_ok == 6
        found = {row["key"]: row["oddity"] for row in bench.rows(summary)}
        assert found["dot"] == "1x1"
        assert found["cmyk"] == "cmyk"
        assert found["short"] == "truncated"
        assert all(found.values())


def test_decoding_finds_an_image_with_damaged_pixels(tmp_path: Path) -> None:
    intact = bytearray(image(3, size=64))
    intact[60:90] = b"\xff" * 30  # inside the compressed pixels
    bench = Bench(tmp_path)
    bench.shard("a.tar", [("a.png", bytes(intact)), ("a.cls", b"1"), *samples(range(3))])
    assert bench.index().catalogue.num_ok == 4
    summary = bench.index(check_images="decode")
    assert summary.catalogue.manifest["status"] == {"ok": 3, "image_unreadable": 1}


def test_a_sample_that_triggers_a_bug_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(data: bytes, decode: bool) -> ImageFacts:
        if data == image(1):
            raise ZeroDivisionError
        return inspect_image(data, decode)

    monkeypatch.setattr("pencil_scale.catalogue.shard_index.inspect_image", broken)
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(3)))
    manifest = bench.index().catalogue.manifest
    assert (manifest["num_ok"], manifest["damage"]) == (2, {"not_understood": 1})


def test_hostile_names_are_rows_whose_ids_come_back_unchanged(tmp_path: Path) -> None:
    from pencil_scale.catalogue.schema import from_stored
    from pencil_scale.storage.errors import sample_key

    names = [
        "../../etc/passwd",
        "/abs",
        "line\nbreak",
        "z" * 10_000,
        "back\\slash",
        "\\xff",
        "é\udcff",
        "<b>&",
    ]
    members = b"".join(
        pax({b"path": f"{name}.{suffix}".encode("utf-8", "surrogateescape")}) + member(b"m", data)
        for number, name in enumerate(names)
        for suffix, data in (("png", image(number)), ("cls", b"1"))
    )
    bench = Bench(tmp_path)
    (tmp_path / "a.tar").write_bytes(members + END)
    summary = bench.index()
    rows = bench.rows(summary)
    assert [from_stored(row["sample_id"]) for row in rows] == names
    assert [row["sample_key"] for row in rows] == [sample_key(name) for name in names]
    assert summary.catalogue.num_ok == len(names)
    assert summary.catalogue.manifest["oddities"]["name_leaves_folder"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "classes.txt", "config.yaml"]


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b"{}", b"[]", b"nul", b'{"url": ' + b"9" * 5000 + b"}", b"\xff"]
)
def test_a_sample_whose_json_has_no_id_is_reported_with_its_key(tmp_path: Path, raw: bytes) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", [("a.png", image(1)), ("a.json", raw), *samples(range(3))])
    summary = bench.index(identity="json:url")
    assert summary.catalogue.manifest["damage"] == {"id_missing": 1}
    assert summary.catalogue.damage()["key"].to_pylist() == ["a"]
    assert accounted_for(summary) == 4


def test_too_much_damage_publishes_nothing_and_names_the_worst_shard(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", GOOD)
    bench.shard("b.tar", [("x.png", b""), *samples(range(20, 30))])
    with pytest.raises(PencilError, match=r"3\.23%.*b\.tar \(1 image_empty\)"):
        bench.index(max_damaged_share=0.03)
    from pencil_scale.catalogue.catalogue import Catalogue

    with pytest.raises(PencilError, match="no catalogue"):
        Catalogue.open(bench.storage)
    assert bench.index(max_damaged_share=0.04).catalogue.num_ok == 30


def test_too_much_damage_lists_the_first_damaged_samples(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    empty = [(f"bad{number}.png", b"") for number in range(7)]
    bench.shard("a.tar", [*samples(range(3)), ("spoilt.png", image(1)[:20]), *empty])
    bench.shard("c.tar", [*samples(range(9, 12)), *sample(9), *samples(range(20, 99))])  # a key again
    with pytest.raises(PencilError) as raised:
        bench.index(shards=f"{tmp_path}/a.tar", max_damaged_share=0.01)
    reported = str(raised.value).splitlines()[1:]
    place = r"a\.tar at byte [\d,]+: the image does not decode; fetch it again"
    assert re.fullmatch(rf"damaged: 'spoilt', image_unreadable: shard .*{place}", reported[0])
    assert [line.split(":")[1] for line in reported[1:]] == [f" 'bad{n}', image_empty" for n in range(4)]
    with pytest.raises(PencilError, match=r"\ndamaged: '000009', key_repeated: shard .*c\.tar at byte"):
        bench.index(shards=f"{tmp_path}/c.tar", max_damaged_share=0.01)


def test_dots_in_names_are_explained_with_the_extensions_they_produce(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    photos = [
        (f"photo.{n:04d}.{kind}", data) for n in range(3) for kind, data in (("png", image(n)), ("cls", b"1"))
    ]
    bench.shard("a.tar", photos)
    with pytest.raises(PencilError) as raised:
        bench.index(max_damaged_share=0.01)
    last = str(raised.value).splitlines()[-1]
    assert last.startswith(
        "extensions found: 0000.cls, 0000.png, 0001.cls, 0001.png, 0002.cls, ...; WebDataset"
    )
    assert "ends a sample's key at the first dot of the file name" in last
    bench.shard("b.tar", sample(1))
    bench.shard("c.tar", [("x.a.png", image(1)), ("x.b.png", image(2))])
    found = notes(bench.index().catalogue.manifest)
    assert any("2 of 3 samples have no image or several; extensions found: 0000.cls" in one for one in found)


def test_a_label_with_an_extra_dot_in_its_name_is_reported_by_its_extension(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard(
        "a.tar",
        [(f"p{n}.{kind}", data) for n in range(3) for kind, data in (("png", image(n)), ("v2.txt", b"ant"))],
    )
    bench.shard("b.tar", [("q.png", image(9)), ("q.txt", b"ant")])
    (note,) = alarms(bench.index(label="txt").catalogue.manifest)
    assert (
        "is data.label txt right? (extensions found: png, v2.txt, txt; WebDataset ends a sample's key" in note
    )
    assert "KEY.v2.txt is sample KEY with the extension v2.txt" in note


def test_a_long_run_stops_once_the_limit_will_be_exceeded_anyway(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("0.tar", [("x.png", b""), ("y.png", b"")])
    for shard in range(1, 9):
        bench.shard(f"{shard}.tar", samples(range(shard * 10, shard * 10 + 10)))
    with pytest.raises(PencilError, match=r"damaged, after 1 of the shards, .*0\.tar \(2 image_empty\)"):
        bench.index(max_damaged_share=0.01)


def test_missing_and_empty_shards_count_as_shards_of_mean_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("0.tar", GOOD)
    (tmp_path / "1.tar").write_bytes(b"")
    with pytest.raises(PencilError, match=r"66\.67%"):
        bench.index(shards=f"{tmp_path}/{{0..2}}.tar", max_damaged_share=0.5)
    manifest = bench.index(shards=f"{tmp_path}/{{0..2}}.tar").catalogue.manifest
    assert manifest["damage"] == {"not_a_tar": 1, "shard_missing": 1}


def test_img2dataset_shards_wait_for_their_statistics_and_must_match_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for name in ("00000", "00001"):
        bench.shard(f"{name}.tar", samples(range(int(name) * 10, int(name) * 10 + 10)))
    (tmp_path / "00000_stats.json").write_text(json.dumps({"successes": 10}))
    assert bench.index(img2dataset=True).catalogue.num_ok == 10
    (tmp_path / "00001_stats.json").write_text(json.dumps({"successes": 12}))
    summary = bench.index(img2dataset=True)
    assert summary.catalogue.num_ok == 20
    assert summary.catalogue.manifest["damage"] == {"count_mismatch": 1}


def test_values_from_shards_are_escaped_on_the_page(tmp_path: Path) -> None:
    import fsspec

    bench = Bench(tmp_path)
    script = "<script>alert(1)</script>"
    bench.shard("a.tar", [*sample(1), *sample(1, key=script), *sample(2), *sample(1, key=script)])
    bench.shard("b.tar", [("l.png", image(1)), ("l.txt", script.encode())])
    bench.shard("c.tar", [("m.png", image(3)), ("m.txt", b"ant")])
    bench.index(label="txt")
    with fsspec.open(f"{bench.storage}/catalogue/summary.html", "rt") as file:
        page = file.read()
    assert script not in page
    assert page.count("&lt;script&gt;") >= 2
    assert not {"src=", "href=", "url("} & set(re.findall(r"src=|href=|url\(", page))


def test_a_false_sparse_size_in_a_pax_header_does_not_crash(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    data = pax({b"GNU.sparse.realsize": b"99999999999", b"GNU.sparse.name": b"x.png"}) + member(b"y", b"1")
    (tmp_path / "a.tar").write_bytes(data + python_tar(GOOD, tarfile.GNU_FORMAT))
    summary = bench.index()
    assert summary.catalogue.manifest["status"] == {"ok": 20, "sparse_member": 1}
