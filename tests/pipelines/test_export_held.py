"""Held labels are exported only with --force, which says so on the console and in the manifest."""

import json
from pathlib import Path

import pytest
from export_making import ExportBench, two_shards

from pencil_scale.export.files import read_manifest
from pencil_scale.labels.published import held_url, published_url
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of
from pipelines import export_labels

REASON = "the repair is not clearly a gain"


@pytest.fixture
def bench(tmp_path: Path) -> ExportBench:
    """A run whose labels are held."""
    found = two_shards(tmp_path)
    filesystem, _ = filesystem_of(found.storage)
    filesystem.mv(published_url(found.storage, "t"), held_url(found.storage, "t"))
    record = {"name": "t", "id": "t", "settings": {}, "catalogue_version": 1, "class_names": [], "clean": {}}
    record |= {"labels": "", "status": "held", "held_because": [REASON]}
    Storage(found.storage).put("runs/t/run.json", json.dumps(record).encode())
    return found


def export(bench: ExportBench, *words: str) -> int:
    keys = [f"export.folder={bench.out}", "export.predict=false"]
    return export_labels.main([str(bench.folder / "config.yaml"), *keys, *words])


def test_held_labels_are_refused(bench: ExportBench, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(bench) == 2
    refused = capsys.readouterr().err
    assert REASON in refused
    typed = bench.folder / "config.yaml"
    assert f"`python -m pipelines.promote {typed} t`" in refused
    assert f"export_labels {typed} export.labels=t --force`" in refused
    assert not bench.out.exists()


def test_force_exports_them_and_says_why_they_are_held(
    bench: ExportBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(bench, "--force") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"WARNING: HELD LABELS ARE EXPORTED (--force): {REASON}"
    assert said[-1].startswith("WARNING: the labels of this export are HELD")
    manifest = read_manifest(str(bench.out))
    assert manifest is not None
    assert manifest.held_because == (REASON,)
    assert [row["row"] for row in bench.table() if row["is_label_issue"]] == [1, 7]


def test_an_export_after_their_release_says_nothing_of_it(
    bench: ExportBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(bench, "--force") == 0
    filesystem, _ = filesystem_of(bench.storage)
    filesystem.mv(held_url(bench.storage, "t"), published_url(bench.storage, "t"))
    capsys.readouterr()
    assert export(bench, "--force") == 0
    assert "HELD" not in capsys.readouterr().out
    assert json.loads((bench.out / "manifest.json").read_text())["held_because"] == []


def test_an_export_repeats_what_the_run_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = two_shards(tmp_path)
    warnings = {"evidence": "nothing could be measured: too few samples are watched; review the labels"}
    facts = {"warnings": warnings, "held_because": ["released since"]}
    Storage(bench.storage).put("runs/t/summary.json", json.dumps(facts).encode())
    assert export(bench) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert said == ["WARNING: Nothing could be measured: too few samples are watched."]
