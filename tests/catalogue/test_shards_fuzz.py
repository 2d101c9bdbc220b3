"""Tars with bytes flipped, wiped, cut or repeated: no member vanishes unreported, and nothing raises."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue_making import CLASSES, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_spoiling import Original, Spoiled, originals, spoil
from tar_making import python_tar, simple_members

from pencil_scale.catalogue.catalogue import Shard
from pencil_scale.catalogue.class_names import LabelClasses
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.catalogue.shard_index import IndexRules, ShardIndexer
from pencil_scale.catalogue.shards import Sample, ShardReader
from pencil_scale.catalogue.tar_walk import Damage, Filler, Member, Piece, TarWalk
from pencil_scale.storage.urls import MemorySource, Window

USTAR = python_tar(simple_members(12, bytes(range(256)) * 5))
PAX = python_tar(
    [(f"d/é{number:03d}.{'x' * 120}.jpg", b"1" * 700) for number in range(8)], tarfile.PAX_FORMAT
)
GNU = python_tar([(f"{'d' * 120}/{number:03d}.jpg", b"1" * 700) for number in range(8)], tarfile.GNU_FORMAT)

REAL = python_tar(samples(range(20)))
RULES = IndexRules("key", "cls", LabelClasses(tuple(CLASSES), {}), decode_images=True)
HEADER_RULES = IndexRules("key", "cls", LabelClasses(tuple(CLASSES), {}))
STARTS = {
    found.key: found.start for found in ShardReader(MemorySource(REAL)).read() if isinstance(found, Sample)
}

Edit = tuple[str, int, int, bytes]

edits = st.lists(
    st.tuples(
        st.sampled_from(["put", "wipe", "cut", "insert", "drop", "repeat"]),
        st.one_of(st.integers(0, 60_000), st.integers(0, 110).map(lambda number: number * 512)),
        st.integers(0, 3000),
        st.binary(min_size=1, max_size=600),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, steps: list[Edit]) -> bytes:
    for action, at, length, raw in steps:
        at = at % (len(data) + 1)
        rest = {
            "put": raw + data[at + len(raw) :],
            "wipe": bytes(len(data[at : at + length])) + data[at + length :],
            "cut": b"",
            "insert": raw + data[at:],
            "drop": data[at + length :],
            "repeat": data[at : at + length] + data[at:],
        }[action]
        data = data[:at] + rest
    return data


def looks_ended(data: bytes, start: int) -> bool:
    """An archive wiped to its end, or cut at a boundary, is what a shorter one looks like."""
    end = -(-len(data.rstrip(b"\0")) // 512) * 512
    return start >= len(data) or (start >= end and len(data) - end >= 1024)


def pieces(data: bytes) -> list[Piece]:
    return list(TarWalk(Window(MemorySource(data))).pieces())


def indexed(data: bytes, rules: IndexRules) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records and the damage of a shard, after checking that each sample is in exactly one of them."""
    shard = Shard("memory", len(data), "", "")
    records, damage = (table.to_pylist() for table in ShardIndexer(MemorySource(data), shard, rules).read())
    assert shard.num_samples == len(records) + sum(each["num_samples"] for each in damage)
    return records, damage


@pytest.mark.slow
@settings(max_examples=150)
@given(st.sampled_from([USTAR, PAX, GNU]), edits)
def test_the_pieces_tile_any_file_whatever_was_done_to_it(data: bytes, steps: list[Edit]) -> None:
    position = 0
    for piece in pieces(edited(data, steps)):
        assert piece.start == position
        assert piece.end > piece.start or isinstance(piece, Damage)
        position = piece.end
    assert position == len(edited(data, steps))


@pytest.mark.slow
@settings(max_examples=150)
@given(edits)
def test_an_original_member_is_found_again_or_is_inside_damage(steps: list[Edit]) -> None:
    steps = [step for step in steps if step[0] in ("put", "wipe", "cut")]  # these keep offsets
    spoiled = edited(USTAR, steps)
    found = pieces(spoiled)
    members = {(piece.name, piece.start, piece.size) for piece in found if isinstance(piece, Member)}
    bad = [(piece.start, piece.end) for piece in found if isinstance(piece, Damage)]
    for member in pieces(USTAR):
        if isinstance(member, Filler | Damage) or looks_ended(spoiled, member.start):
            continue
        inside = any(start <= member.start < end for start, end in bad)
        assert inside or (member.name, member.start, member.size) in members


@settings(max_examples=100)
@given(st.binary(max_size=4000))
def test_arbitrary_bytes_are_damage_and_give_no_sample(data: bytes) -> None:
    found = list(ShardReader(MemorySource(data)).read())
    assert not any(isinstance(each, Sample) for each in found)
    assert found or not data.strip(b"\0")


@pytest.mark.slow
@settings(max_examples=150)
@given(st.sampled_from([USTAR, PAX, GNU]), edits)
def test_samples_hold_only_bytes_that_exist(data: bytes, steps: list[Edit]) -> None:
    spoiled = edited(data, steps)
    reader = ShardReader(MemorySource(spoiled))
    for found in reader.read():
        if isinstance(found, Sample):
            for member in found.members.values():
                if member.kind != "cut":
                    assert reader.data(member) == spoiled[member.offset : member.offset + member.size]
                    assert len(reader.data(member)) == member.size


@pytest.mark.slow
@settings(max_examples=80)
@given(edits)
def test_every_sample_of_a_damaged_shard_is_a_record_or_in_the_damage_table(steps: list[Edit]) -> None:
    spoiled = edited(REAL, [step for step in steps if step[0] in ("put", "wipe", "cut")])
    records, findings = indexed(spoiled, RULES)
    keys = [record["key"] for record in records]
    reported = set(keys) | {finding["key"] for finding in findings}
    for key, start in STARTS.items():
        if not looks_ended(spoiled, start):
            inside = any(finding["start"] <= start < finding["end"] for finding in findings)
            assert key in reported or inside


def found_in(spoiled: Spoiled) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Records by key, and findings; each sample that was found is in one of them."""
    records, findings = indexed(spoiled.data, HEADER_RULES)
    return {from_stored(each["key"]): each for each in records}, findings


def check_ok_rows(original: Original, spoiled: Spoiled, records: dict[str, dict[str, Any]]) -> None:
    """An ok row points at its own image, at most changed in its place: only a decoder can detect that."""
    for key, record in records.items():
        if record["found_status"] != "ok" or key not in original.samples:
            continue
        members = original.samples[key]
        (place,) = (place for suffix, place in members.items() if suffix in ("jpg", "png"))
        if spoiled.where((place[0], place[1], place[1])) is None or record["oddity"] == "truncated":
            continue  # a header in the place of another is valid, and a truncated image is reported as such
        first = record["image_offset"]
        found = spoiled.origin[first : first + record["image_bytes"]]
        expected = np.arange(place[1], place[2])
        assert len(found) == len(expected), (spoiled.what, key)
        assert np.all((found == expected) | (found == -1)), (spoiled.what, key)
        if spoiled.where(members["cls"]) is not None:
            start, end = members["cls"][1:]
            assert record["noisy_class"] == int(original.data[start:end]), (spoiled.what, key)


@pytest.mark.slow
def test_intact_samples_of_a_damaged_shard_are_ok_and_the_others_are_reported(tmp_path: Path) -> None:
    for writer, original in originals(tmp_path):
        for number in range(85):
            spoiled = spoil(original.data, f"{writer} {number}")
            records, findings = found_in(spoiled)
            check_ok_rows(original, spoiled, records)
            for key, members in original.samples.items():
                places = [spoiled.where(place) for place in members.values()]
                if None not in places:
                    assert records[key]["found_status"] == "ok", (writer, spoiled.what, key)
                spans = [(each["start"], each["end"]) for each in findings]
                inside = any(
                    start <= place < end for start, end in spans for place in places if place is not None
                )
                assert key in records or inside or not any(places), (writer, spoiled.what, key)
