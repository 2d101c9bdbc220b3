"""Deciding about duplicates in hash ranges, compared with plain dictionaries."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pencil_scale.catalogue.duplicates import (
    ALIAS,
    MOVED,
    NEW,
    Decisions,
    Keys,
    KnownRows,
    contains,
    decide,
    find_equal_content,
)
from pencil_scale.storage.errors import sample_key

ids = st.lists(st.integers(0, 30), max_size=60)


def hashes(numbers: list[int]) -> Keys:
    return np.array([sample_key(str(number)) for number in numbers], dtype="S16")


def decided(new: list[int], known: dict[int, bool], per_range: int) -> Decisions:
    def new_keys() -> Iterator[tuple[Keys, np.ndarray]]:
        for start in range(0, len(new), 7):
            some = new[start : start + 7]
            yield hashes(some), start + np.arange(len(some))

    def known_rows() -> Iterator[KnownRows]:
        numbers = list(known)
        for start in range(0, len(numbers), 5):
            some = numbers[start : start + 5]
            valid = np.array([known[number] for number in some], np.bool_)
            yield KnownRows(np.arange(start, start + len(some)), hashes(some), valid)

    return decide(len(new), new_keys, known_rows, len(known), per_range)


@settings(max_examples=60)
@given(ids, st.dictionaries(st.integers(0, 30), st.booleans()), st.sampled_from([1, 8, 1000]))
def test_deciding_by_hash_ranges_equals_deciding_with_a_dictionary(
    new: list[int], known: dict[int, bool], per_range: int
) -> None:
    decisions = decided(new, known, per_range)
    row_of = {number: row for row, number in enumerate(known)}
    valid = dict(known)
    next_row = len(known)
    expected = []
    for number in new:
        if number not in row_of:
            row_of[number], valid[number], kind = next_row, True, NEW
            next_row += 1
        else:
            kind = ALIAS if valid[number] else MOVED
            valid[number] = True
        expected.append((kind, row_of[number]))
    assert decisions.kind.tolist() == [kind for kind, _ in expected]
    others = np.flatnonzero(decisions.kind != NEW)
    assert decisions.target_rows(others).tolist() == [expected[place][1] for place in others]
    orphans = [row_of[number] for number, stood in known.items() if not stood and number not in new]
    assert decisions.orphans.tolist() == sorted(orphans)


def test_a_key_that_ends_in_zeros_is_not_mistaken_for_another() -> None:
    keys = np.array([b"a" * 16, b"a" * 15 + b"\0", b"a" * 14 + b"\0\0"], dtype="S16")
    assert len(np.unique(keys)) == 3
    assert contains(np.sort(keys[:2]), keys).tolist() == [True, True, False]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60), st.sampled_from([1, 4, 1000]))
def test_proven_noise_equals_a_simple_count(pairs: list[tuple[int, int]], per_range: int) -> None:
    def contents() -> Iterator[tuple[Keys, np.ndarray]]:
        for start in range(0, len(pairs), 9):
            some = pairs[start : start + 9]
            yield hashes([each for each, _ in some]), np.array([label for _, label in some], np.int32)

    found = find_equal_content(len(pairs), contents, per_range)
    groups: dict[int, Counter[int]] = {}
    for content, label in pairs:
        groups.setdefault(content, Counter())[label] += 1
    repeated = [group for group in groups.values() if group.total() > 1]
    assert found["num_labelled"] == len(pairs)
    assert found["num_repeated_images"] == len(repeated)
    assert found["num_samples"] == sum(group.total() for group in repeated)
    assert found["num_conflicting_images"] == sum(len(group) > 1 for group in repeated)
    assert found["num_proven_wrong"] == sum(group.total() - max(group.values()) for group in repeated)
