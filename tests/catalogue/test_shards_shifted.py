"""Tars that lost or gained bytes in the middle: what is found after them, and what is not trusted."""

import tarfile

import pytest
from tar_making import BLOCK, END, block, member, pax, python_tar, simple_members
from tar_reading import details, keys, kinds, pieces, read

from pencil_scale.catalogue.shards import Sample, ShardReader
from pencil_scale.catalogue.tar_walk import Member
from pencil_scale.storage.urls import MemorySource

SHARD = python_tar(simple_members(6, b"i" * 700))
HEADERS = [piece.start for piece in pieces(SHARD) if isinstance(piece, Member)]


def inserted(at: int, raw: bytes) -> bytes:
    return SHARD[:at] + raw + SHARD[at:]


def without(at: int, length: int) -> bytes:
    return SHARD[:at] + SHARD[at + length :]


def states(data: bytes) -> dict[str, dict[str, str]]:
    """The kind of each sample's members."""
    return {
        sample.key: {suffix: found.kind for suffix, found in sample.members.items()}
        for sample in read(data)[0]
    }


WHOLE = states(SHARD)
IMAGE = HEADERS[3] + BLOCK  # the data of sample 1's image: 700 bytes, 324 of padding


@pytest.mark.parametrize(
    "data",
    [
        inserted(IMAGE + 100, b"abc"),
        inserted(IMAGE + 100, b"x" * 512),
        without(IMAGE + 100, 3),
        without(IMAGE + 100, 400),
        without(IMAGE + 100, 512),
    ],
    ids=["3 more", "512 more", "3 less", "400 less", "512 less"],
)
def test_bytes_lost_or_added_in_a_members_data_lose_that_member_and_no_other(data: bytes) -> None:
    (damage,) = read(data)[1]
    assert (damage.kind, damage.start, damage.name) == ("shifted_bytes", HEADERS[3], "000001.jpg")
    assert states(data) == {**WHOLE, "000001": {"jpg": "cut", "cls": "file", "json": "file"}}


@pytest.mark.parametrize(
    "data",
    [
        inserted(HEADERS[4] - 100, b"abc"),
        without(HEADERS[4] - 100, 3),
        inserted(HEADERS[4], b"abc"),
        without(IMAGE + 700, 324),
    ],
    ids=["3 more in padding", "3 less in padding", "3 more between", "no padding"],
)
def test_bytes_lost_or_added_between_members_lose_no_member_and_are_reported(data: bytes) -> None:
    assert kinds(data) == ["shifted_bytes"]
    assert states(data) == WHOLE
    reader = ShardReader(MemorySource(data))
    contents = {
        found.key: reader.data(found.members["jpg"]) for found in reader.read() if isinstance(found, Sample)
    }
    assert contents == dict.fromkeys(WHOLE, b"i" * 700)


def test_bytes_lost_in_a_header_lose_its_member() -> None:
    data = without(HEADERS[4] + 200, 7)
    assert kinds(data) == ["shifted_bytes"]
    assert states(data) == {**WHOLE, "000001": {"jpg": "file", "json": "file"}}


def test_a_member_that_lost_exactly_its_own_data_does_not_swallow_the_next() -> None:
    data = without(IMAGE, 1024)  # all of the image: what follows is exactly where its end should be
    assert [(each.kind, each.name) for each in read(data)[1]] == [("shifted_bytes", "000001.jpg")]
    assert states(data) == {**WHOLE, "000001": {"jpg": "cut", "cls": "file", "json": "file"}}


def test_bytes_lost_in_the_last_member_are_detected_by_the_length_of_the_end() -> None:
    last = HEADERS[-1] + BLOCK
    samples, damage = read(without(last + 5, 3))
    assert [each.kind for each in damage] == ["shifted_bytes"]
    assert samples[-1].members["json"].kind == "cut"
    assert kinds(SHARD[:-3]) == ["odd_end"]
    assert "not a multiple of 512" in details(SHARD[:-3])[0]
    assert states(SHARD[:-3]) == WHOLE


def test_a_tar_within_a_tar_is_data_whatever_follows_it() -> None:
    inner = python_tar([("x.jpg", b"inner"), ("y.jpg", b"inner")])
    last = python_tar([("b.jpg", b"1"), ("a.tar", inner)])
    assert (keys(last), kinds(last)) == (["b", "a"], [])
    spoiled = python_tar([("a.tar", inner), ("b.jpg", b"1"), ("c.jpg", b"1")])
    behind = len(inner) + BLOCK
    spoiled = spoiled[:behind] + b"\xa5" * BLOCK + spoiled[behind + BLOCK :]
    assert (keys(spoiled), kinds(spoiled)) == (["a", "c"], ["damaged_header"])


def test_a_header_that_is_contradicted_by_its_own_data_is_not_trusted() -> None:
    stray = block(b"z.jpg", 4000)  # a header that a copying error put among an image's bytes
    image = block(b"a.jpg", 3000)[:50] + bytes(462) + b"i" * 512 + stray + b"i" * 512
    data = image + member(b"b.jpg", b"1") + member(b"c.jpg", b"1") + END
    assert (keys(data), kinds(data)) == (["b", "c"], ["damaged_header"])


def test_a_header_after_lost_padding_does_not_contradict_the_one_before() -> None:
    joined = python_tar([("a.jpg", b"1")]) + python_tar([("b.jpg", b"2" * 100), ("c.jpg", b"3")])
    place = 10_240 + BLOCK + 300  # in the padding of the first member after the zeros
    assert keys(joined[:place] + joined[place + 12 :]) == ["a", "b", "c"]


def test_a_shortened_name_is_not_used_if_the_header_with_the_full_name_is_lost() -> None:
    long = "n" * 150
    data = python_tar([("a.jpg", b"1"), (f"{long}.jpg", b"2"), ("b.jpg", b"3")], tarfile.GNU_FORMAT)
    spoiled = data[:1024] + b"\xa5" * BLOCK + data[1024 + BLOCK :]
    assert (keys(spoiled), kinds(spoiled)) == (["a", "b"], ["damaged_header", "damaged_header"])
    assert details(spoiled)[1].endswith("the header with its full name is damaged")


def test_two_extended_headers_in_a_row_belong_to_two_members() -> None:
    data = pax({b"path": b"lost.jpg"}) + pax({b"path": b"a.jpg"}) + member(b"x", b"1") + END
    assert (keys(data), kinds(data)) == (["a"], ["damaged_header"])
    assert details(data) == ["an extended header without its member"]


def test_a_chain_of_headers_inside_a_member_is_followed_once() -> None:
    chain = b"".join(block(b"f", 0) for _ in range(500)) + b"x" * BLOCK
    data = member(b"a.bin", b"y" * BLOCK + chain) + member(b"b.jpg", b"1") + END
    assert (keys(data), kinds(data)) == (["a", "b"], [])


def test_headers_are_found_even_if_every_member_lost_bytes() -> None:
    torn = b"".join(member(b"%03d.jpg" % number, b"q" * 1024)[:-7] for number in range(50))
    samples, damage = read(torn + END)
    assert [sample.key for sample in samples] == [f"{number:03d}" for number in range(50)]
    assert {sample.members["jpg"].kind for sample in samples} == {"cut"}
    assert len(damage) == 50


def test_many_false_headers_are_searched_once() -> None:
    assert kinds(b"ustar\0" * 20_000) == ["not_a_tar"]
    claims = b"".join(block(b"f.jpg", (400 - number) * BLOCK) for number in range(400)) + bytes(BLOCK)
    assert len(read(claims)[1]) == 400
