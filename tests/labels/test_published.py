"""Published labels are found by name or URL; held labels only on request."""

from pathlib import Path

import pytest
from catalogue_making import samples
from review_making import ReviewBench

from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import find_published, held_names, held_url, published_names, published_url
from pencil_scale.labels.run_record import RunRecord, write_record
from pencil_scale.storage.errors import PencilError


@pytest.fixture
def bench(tmp_path: Path) -> ReviewBench:
    """Two runs: one is published, one held."""
    found = ReviewBench(tmp_path)
    found.shard("a.tar", samples(range(6)))
    found.index()
    found.publish({}, name="good")
    Manifest.load(published_url(found.storage, "good")).save(held_url(found.storage, "bad"))
    write_record(
        found.storage,
        RunRecord("bad", "a1b2", {}, 1, (), {}, "", status="held", held_because=("cat vanished",)),
    )
    return found


@pytest.mark.parametrize("by_url", [False, True])
def test_held_labels_are_refused_with_the_reasons_and_what_to_do(bench: ReviewBench, by_url: bool) -> None:
    named = held_url(bench.storage, "bad") if by_url else "bad"
    with pytest.raises(PencilError, match="are held: cat vanished") as refused:
        find_published(bench.storage, named)
    export = "export_labels CONFIG export.labels=bad --force"
    for command in ("review_report CONFIG report.labels=bad", "promote CONFIG bad", export):
        assert command in str(refused.value)


def test_an_unknown_name_is_refused_with_the_names_that_exist(bench: ReviewBench) -> None:
    with pytest.raises(PencilError, match="no published labels") as refused:
        find_published(bench.storage, "god")
    assert "published are good; held are bad" in str(refused.value)
    assert "export_labels CONFIG export.labels=bad --force" in str(refused.value)


def test_held_labels_are_found_on_request_and_marked_as_held(bench: ReviewBench) -> None:
    found = find_published(bench.storage, "bad", held=True)
    assert (found.name, found.url, found.held) == ("bad", held_url(bench.storage, "bad"), True)
    assert not find_published(bench.storage, "good", held=True).held


def test_labels_that_are_published_already_are_no_longer_held(bench: ReviewBench) -> None:
    assert (published_names(bench.storage), held_names(bench.storage)) == (["good"], ["bad"])
    found = find_published(bench.storage, "bad", held=True)
    found.manifest.save(published_url(bench.storage, "bad"))  # a release that was interrupted after this
    assert not find_published(bench.storage, "bad").held
    assert held_names(bench.storage) == []
