"""Tars by other writers and tars made by hand, read member by member and sample by sample."""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tar_making import BLOCK, END, block, member, padded, pax, python_tar, simple_members, with_checksum
from tar_reading import details, keys, kinds, pieces, read

from pencil_scale.catalogue.shards import Sample, ShardReader, name_oddity, split_name
from pencil_scale.catalogue.tar_walk import Damage, Member
from pencil_scale.storage.urls import MemorySource, open_source

# -- other writers ------------------------------------------------------------------------------------

LONG = "deep/" * 30 + "é" * 60 + ".jpg"


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_formats_of_pythons_writer_give_the_members_it_wrote(tar_format: int) -> None:
    members = [("a.jpg", b"x" * 700), ("a.cls", b"3"), ("dir/b.c.png", b""), ("n" * 99 + "/b.jpg", b"q")]
    if tar_format != tarfile.USTAR_FORMAT:
        members.append((LONG, b"long"))
    data = python_tar(members, tar_format)
    found = [piece for piece in pieces(data) if isinstance(piece, Member)]
    assert [(piece.name, data[piece.offset : piece.offset + piece.size]) for piece in found] == members
    assert kinds(data) == []


@pytest.mark.skipif(not shutil.which("tar"), reason="no tar program here")
@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "pax"])
def test_the_tar_programs_formats_give_the_files_it_packed(tmp_path: Path, tar_format: str) -> None:
    names = ["0001.jpg", "0001.cls", "0002.jpg"] + (
        ["0003" + "y" * 150 + ".jpg"] if tar_format != "v7" else []
    )
    if tar_format == "ustar":
        names.pop()
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    command = ["tar", f"--format={tar_format}", "-cf", "out.shard", *names]
    subprocess.run(command, cwd=tmp_path, check=True)
    with open_source(str(tmp_path / "out.shard")) as source:
        reader = ShardReader(source)
        found = [sample for sample in reader.read() if isinstance(sample, Sample)]
        contents = [reader.data(member) for sample in found for member in sample.members.values()]
    assert [member.name for sample in found for member in sample.members.values()] == names
    assert contents == [name.encode() * 100 for name in names]


@pytest.mark.skipif(not shutil.which("tar"), reason="no tar program here")
@pytest.mark.parametrize(
    "flags", [["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.1"]]
)
def test_sparse_members_of_the_tar_program_are_recognised_and_skipped(
    tmp_path: Path, flags: list[str]
) -> None:
    with (tmp_path / "0.jpg").open("wb") as file:
        for hole in range(1, 12):  # more pieces than one old GNU header can hold
            file.seek(hole * 100_000)
            file.write(b"data" * 2000)
    (tmp_path / "1.jpg").write_bytes(b"whole")
    subprocess.run(["tar", "-S", *flags, "-cf", "out.shard", "0.jpg", "1.jpg"], cwd=tmp_path, check=True)
    found = [each for each in pieces((tmp_path / "out.shard").read_bytes()) if isinstance(each, Member)]
    assert [(each.name, each.kind) for each in found] == [("0.jpg", "sparse"), ("1.jpg", "file")]


def test_webdatasets_writer_and_ours_agree_on_samples(tmp_path: Path) -> None:
    import webdataset

    path = tmp_path / "w.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(20):
            sample = {"__key__": f"d/s{number:03d}", "jpg": b"j" * (number * 97), "cls": number}
            writer.write({**sample, "json": {"url": f"u{number}"}})
    theirs = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert keys(path.read_bytes()) == theirs
    assert kinds(path.read_bytes()) == []


def test_names_split_as_webdataset_splits_them() -> None:
    from webdataset.tariterators import base_plus_ext

    for name in [
        "a.jpg",
        "a.b/c.d.JPG",
        "./x.cls",
        "no_suffix",
        "dir/no",
        ".hidden",
        "a.",
        "a/b/c.tar.gz",
        "../x.jpg",
    ]:
        prefix, suffix = base_plus_ext(name)
        assert split_name(name) == (None if prefix is None else (prefix, suffix.lower()))


# -- header forms -------------------------------------------------------------------------------------


def test_a_base_256_size_and_a_signed_checksum_are_understood() -> None:
    big = member(b"a.jpg", b"x" * 600, size=b"\x80" + (600).to_bytes(11, "big"))
    raw = block("é.jpg".encode(), 3)
    signed = sum(byte - 256 if byte > 127 else byte for byte in raw[:148] + b" " * 8 + raw[156:])
    old = raw[:148] + b"%06o\0 " % signed + raw[156:] + padded(b"abc")
    assert keys(big + old + END) == ["a", "é"]
    assert kinds(big + old + END) == []


def test_a_pax_size_overrules_the_header_and_a_pax_path_names_the_member() -> None:
    long = b"k" * 10_000 + b".jpg"
    data = (
        pax({b"path": long, b"size": b"700"})
        + block(b"short", 0)
        + padded(b"x" * 700)
        + member(b"b.jpg", b"1")
        + END
    )
    samples, damage = read(data)
    assert [sample.key for sample in samples] == ["k" * 10_000, "b"]
    assert samples[0].members["jpg"].size == 700
    assert damage == []


def test_global_pax_headers_hold_until_a_local_one_says_otherwise() -> None:
    data = pax({b"hdrcharset": b"BINARY", b"comment": b"c"}, b"g") + pax({b"path": b"\xff\xfe.jpg"})
    data += member(b"x", b"1") + member(b"b.jpg", b"2") + END
    assert keys(data) == [b"\xff\xfe".decode("utf-8", "surrogateescape"), "b"]


def test_a_v7_header_without_magic_is_read_and_gnu_times_are_not_taken_for_a_prefix() -> None:
    v7 = member(b"a.jpg", b"1", b"\0", magic=bytes(8))
    gnu = with_checksum(
        block(b"b.jpg", 1, magic=b"ustar  \0")[:345] + b"12345670123\0" + bytes(155)
    ) + padded(b"2")
    assert keys(v7 + gnu + END) == ["a", "b"]


def test_links_directories_and_devices_have_no_data_whatever_their_size_field_says() -> None:
    data = (
        member(b"d/", b"", b"5")
        + block(b"d/a.jpg", 9000, b"1")
        + block(b"fifo", 0, b"6")
        + member(b"b.jpg", b"1")
        + END
    )
    reader = ShardReader(MemorySource(data))
    samples = [each for each in reader.read() if isinstance(each, Sample)]
    assert [(each.key, each.members["jpg"].kind) for each in samples] == [("d/a", "link"), ("b", "file")]
    assert reader.skipped == {"directory": 1, "other": 1}
    assert pieces(data)


def test_a_hard_link_with_data_is_skipped() -> None:
    data = member(b"a.jpg", b"x" * 900, b"1") + member(b"b.jpg", b"1") + END
    assert keys(data) == ["a", "b"]
    assert kinds(data) == []


# -- damage -------------------------------------------------------------------------------------------

SHARD = python_tar(simple_members(6, b"i" * 700))
HEADERS = [piece.start for piece in pieces(SHARD) if isinstance(piece, Member)]


def test_an_empty_file_a_text_and_a_gzip_are_not_tars() -> None:
    assert (kinds(b""), details(b"")) == (["not_a_tar"], ["the file is empty"])
    assert kinds(b"<html>not found</html>" * 100) == ["not_a_tar"]
    assert kinds(b"too short") == ["not_a_tar"]
    assert "gzip" in read(b"\x1f\x8b" + b"z" * 2000)[1][0].detail


def test_an_archive_that_is_only_an_end_marker_is_not_damaged() -> None:
    assert kinds(END) == []
    assert kinds(bytes(10240)) == []


def test_a_cut_at_a_member_boundary_is_reported_as_a_missing_end_marker() -> None:
    cut = SHARD[: HEADERS[4]]
    samples, damage = read(cut)
    assert [(each.kind, each.detail[:13]) for each in damage] == [("odd_end", "no end marker")]
    assert samples[-1].near_damage
    assert list(samples[-1].members) == ["jpg"]


def test_a_single_zero_block_is_not_an_end_marker() -> None:
    data = member(b"a.jpg", b"1") + bytes(BLOCK)
    assert kinds(data) == ["odd_end"]
    assert "a single zero block" in details(data)[0]


def test_cuts_in_a_header_and_in_data_are_reported_with_their_byte() -> None:
    samples, damage = read(SHARD[: HEADERS[3] + 100])
    assert [(each.kind, each.start) for each in damage] == [("cut_short", HEADERS[3])]
    assert damage[0].detail == "the file ends inside a header, 100 bytes into its 512"
    assert len(samples) == 1
    samples, damage = read(SHARD[: HEADERS[3] + BLOCK + 300])
    assert (damage[0].kind, damage[0].start) == ("cut_short", HEADERS[3])
    assert damage[0].detail == "a member of 700 bytes, of which 300 are there"
    assert (samples[1].key, samples[1].members["jpg"].kind) == ("000001", "cut")


def test_a_member_without_padding_is_intact() -> None:
    samples, damage = read(member(b"a.jpg", b"abc")[: BLOCK + 3])
    assert samples[0].members["jpg"].kind == "file"
    assert [each.kind for each in damage] == ["odd_end"]


@pytest.mark.parametrize("spoil", [b"\xff" * BLOCK, bytes(BLOCK)])
def test_a_damaged_header_loses_only_its_own_member(spoil: bytes) -> None:
    data = SHARD[: HEADERS[3]] + spoil + SHARD[HEADERS[3] + BLOCK :]
    samples, damage = read(data)
    found = (
        "no header where one should be" if spoil.strip(b"\0") else "512 zero bytes where a header should be"
    )
    assert [(each.kind, each.detail) for each in damage] == [("damaged_header", found)]
    assert (damage[0].start, damage[0].end) == (HEADERS[3], HEADERS[4])
    assert [sample.key for sample in samples] == [f"{number:06d}" for number in range(6)]
    assert [sample.near_damage for sample in samples] == [True, True, False, False, False, False]
    assert list(samples[1].members) == ["cls", "json"]


def test_members_after_a_wiped_range_or_a_joined_archive_are_found() -> None:
    wiped = SHARD[: HEADERS[3]] + bytes(HEADERS[6] - HEADERS[3]) + SHARD[HEADERS[6] :]
    assert keys(wiped) == ["000000", "000002", "000003", "000004", "000005"]
    assert kinds(wiped) == ["data_after_end"]
    joined = SHARD + python_tar([("z.jpg", b"1")])
    assert keys(joined)[-2:] == ["000005", "z"]
    assert kinds(joined) == ["data_after_end"]
    assert "then more members" in details(joined)[0]


def test_garbage_after_the_end_is_reported_and_loses_no_sample() -> None:
    assert kinds(SHARD + b"garbage" * 100) == ["data_after_end"]
    assert "then bytes without a header" in details(SHARD + b"garbage" * 100)[0]
    assert len(keys(SHARD + b"garbage" * 100)) == 6


def test_a_preallocated_file_that_was_not_filled_is_cut_short() -> None:
    assert kinds(SHARD[: HEADERS[6]] + bytes(50_000)) == ["cut_short"]
    assert details(SHARD[: HEADERS[6]] + bytes(50_000))[0].startswith("50,000 zero bytes at the end")
    assert kinds(SHARD[: HEADERS[6]] + bytes(-HEADERS[6] % 10_240)) == []
    assert kinds(SHARD[: HEADERS[6]] + bytes(-HEADERS[6] % (1 << 20))) == []  # tar -b 2048


def test_a_broken_or_huge_extended_header_loses_only_its_own_member() -> None:
    members = member(b"a.jpg", b"1") + member(b"b.jpg", b"2") + END
    broken = member(b"pax", b"99 path=x\n", b"x") + members
    huge = member(b"L", b"n" * (2 << 20), b"L") + members
    endless = pax({b"size": b"9" * 5000}) + members
    stray = member(b"b.jpg", b"2") + pax({b"path": b"x.jpg"}) + END
    cases = {
        broken: "a member of 1 bytes whose name is uncertain: its pax header is broken",
        huge: "its extended header has 2,097,152 bytes, an attack or a writer's error",
        endless: "its pax header is broken",
        stray: "an extended header without its member",
    }
    for data, found in cases.items():
        assert (keys(data), kinds(data)) == (["b"], ["damaged_header"])
        assert found in details(data)[0]


def test_a_size_beyond_the_file_does_not_hide_the_members_after_it() -> None:
    data = block(b"a.jpg", 8**11 - 1) + padded(b"x") + member(b"b.jpg", b"2") + END
    assert (keys(data), kinds(data)) == (["a", "b"], ["cut_short"])


# -- samples ------------------------------------------------------------------------------------------


def test_repeated_keys_are_reported_as_repeated_or_not_contiguous() -> None:
    samples, damage = read(
        python_tar([("a.jpg", b"1"), ("b.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2"), ("c.jpg", b"")])
    )
    assert [sample.key for sample in samples] == ["a", "b", "c"]
    assert [(each.kind, each.name) for each in damage] == [("key_not_contiguous", "a"), ("key_repeated", "b")]


def test_a_file_without_a_key_is_reported_and_metadata_files_are_counted() -> None:
    names = [".jpg", "d/.hidden.PNG", ".cls", "README", "a.jpg", "._a.jpg", "__info__/x.jpg"]
    data = python_tar([(name, b"1") for name in names])
    reader = ShardReader(MemorySource(data))
    found = list(reader.read())
    damage = [each for each in found if isinstance(each, Damage)]
    assert [(each.kind, each.name) for each in damage] == [("no_key", name) for name in names[:4]]
    assert [each.num_samples for each in damage] == [1, 1, 0, 0]
    assert [each.start for each in damage] == [0, 1024, 2048, 3072]
    assert [each.key for each in found if isinstance(each, Sample)] == ["a"]
    assert reader.skipped == {"macos_metadata": 1, "meta": 1}


def test_two_members_with_the_same_name_are_a_problem_of_their_sample() -> None:
    samples, _ = read(python_tar([("a.jpg", b"1"), ("a.JPG", b"2"), ("b.jpg", b"1")]))
    assert [sample.has_repeated_member for sample in samples] == [True, False]


def test_the_image_is_the_one_with_a_plain_suffix() -> None:
    samples, _ = read(
        python_tar(
            [
                ("a.seg.png", b"1"),
                ("a.jpg", b"2"),
                ("b.x.png", b"3"),
                ("c.jpg", b""),
                ("c.png", b""),
                ("d.cls", b""),
            ]
        )
    )
    images = [sample.image() for sample in samples]
    assert [(image.name if image else None, problem) for image, problem in images] == [
        ("a.jpg", None),
        ("b.x.png", None),
        (None, "several_images"),
        (None, "image_missing"),
    ]


def test_hostile_names_are_ordinary_keys_with_an_oddity() -> None:
    names = ["../../etc/passwd.jpg", "/abs.jpg", "line\nbreak.jpg", "z" * 10_000 + ".jpg", "fine.jpg"]
    buffer = python_tar([(name, b"1") for name in names], tarfile.PAX_FORMAT)
    samples, damage = read(buffer)
    assert [sample.members["jpg"].name for sample in samples] == names
    expected = ["name_leaves_folder", "name_is_absolute", "name_not_text", "name_very_long", None]
    assert [name_oddity(name) for name in names] == expected
    assert damage == []


def test_a_large_member_is_skipped_without_reading_it() -> None:
    source = MemorySource(python_tar([("a.jpg", bytes(8 << 20)), ("b.jpg", b"1")]))
    read, lengths = source.read, []

    def counting(start: int, length: int) -> bytes:
        lengths.append(length)
        return read(start, length)

    source.read = counting
    assert len(list(ShardReader(source).read())) == 2
    assert sum(lengths) < 1 << 20


def test_the_bytes_of_a_sample_are_available_when_it_is_yielded() -> None:
    contents = {f"{number:04d}": bytes([number % 256]) * (number * 37 % 9000) for number in range(300)}
    data = python_tar(
        [(f"{key}.{suffix}", value) for key, value in contents.items() for suffix in ("jpg", "raw")]
    )
    reader = ShardReader(MemorySource(data))
    for sample in reader.read():
        assert isinstance(sample, Sample)
        assert {reader.data(member) for member in sample.members.values()} == {contents[sample.key]}


def test_tarfile_and_the_walk_agree_on_a_tar_of_tars() -> None:
    inner = python_tar([("x.jpg", b"inner")])
    data = python_tar([("a.tar", inner), ("b.jpg", b"1")])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert [piece.name for piece in pieces(data) if isinstance(piece, Member)] == archive.getnames()
