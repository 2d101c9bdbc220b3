"""promote: CURRENT moves to any kept night, and held labels are released."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from catalogue_making import samples
from label_making import names, new_labels
from night_making import Nights, started

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.export.files import read_manifest
from pencil_scale.labels.published import find_published, held_names, held_url, published_url
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.method.backbones import build_backbone
from pencil_scale.nights.record import Night, NightFiles, night_name, remove_taken_down
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.lease import Lease
from pencil_scale.train import summary
from pipelines import pin_labels
from pipelines import promote as promoting
from pipelines.promote import main


@pytest.fixture
def bench(tmp_path: Path) -> Nights:
    """Six samples in a catalogue on the local disk."""
    found = Nights(tmp_path)
    found.storage = str(tmp_path / "lake")
    found.shard("a.tar", samples(range(6)))
    found.index()
    return found


@pytest.fixture
def nights(bench: Nights) -> NightFiles:
    """Three nights, each the parent of the next; the last is held, the second in use."""
    files = bench.nights
    for number in (1, 2, 3):
        parent = night_name(number - 1) if number > 1 else None
        held = {"status": "held", "reasons": ("the class balance jumped",)} if number == 3 else {}
        files.save(made_night(bench, number, parent), closed=True, **held)
    files.move_current(files.must_find("night-0002"), expected=None)
    return files


def made_night(bench: Nights, number: int, parent: str | None) -> Night:
    """A night with labels and a model, but without export and page."""
    catalogue, name = Catalogue.open(bench.storage), night_name(number)
    bench.labels(catalogue).save(published_url(bench.storage, name))
    sink = io.BytesIO()
    torch.save(build_backbone("small_convnet", 3).state_dict(), sink)
    Folder(f"{bench.storage}/models").put(f"{name}.pt", sink.getvalue())
    made = {"model": f"{bench.storage}/models/{name}.pt", "labels": published_url(bench.storage, name)}
    return started(
        number, parent, status="passed", class_names=catalogue.class_names, trained_by="run", **made
    )


def promote(nights: NightFiles, *words: str) -> int:
    return main([f"{Path(nights.storage).parent}/config.yaml", *words])


def current(nights: NightFiles) -> str | None:
    night = nights.current()
    return None if night is None else night.name


@pytest.mark.slow
def test_a_held_night_is_released_and_a_bad_one_rolled_back(
    nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(nights, "night-0003") == 0
    assert current(nights) == "night-0003"
    assert "the class balance jumped" in capsys.readouterr().out
    assert promote(nights, "night-0001") == 0
    assert current(nights) == "night-0001"
    assert promote(nights, "night-0001") == 0  # a repetition changes nothing


@pytest.mark.slow
def test_an_error_about_an_unknown_night_lists_the_kept_ones(
    nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(nights, "night-0009") == 2
    error = capsys.readouterr().err
    assert "night-0009: no held run and no finished night" in error
    assert "held runs: none; nights: night-0001, night-0002, night-0003" in error
    assert current(nights) == "night-0002"


@pytest.mark.slow
def test_a_night_killed_before_its_last_step_does_not_undo_a_rollback(
    bench: Nights, nights: NightFiles
) -> None:
    nights.save(made_night(bench, 4, "night-0002"))
    assert nights.unclosed() is not None  # it would resume, and take CURRENT
    assert promote(nights, "night-0002") == 0
    assert nights.unclosed() is None


@pytest.mark.slow
def test_an_export_and_a_page_that_were_removed_are_made_again_before_current_moves(
    bench: Nights, nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(nights, "night-0001") == 0
    night = nights.current()
    assert night is not None
    exported = read_manifest(str(night.export))
    assert exported is not None
    assert exported.labels == night.labels
    assert promote(nights, "night-0002") == 0
    takedown = bench.folder / "exclude.txt"
    takedown.write_text("000003\n")
    bench.index(exclude=str(takedown))
    removed = remove_taken_down(nights, Catalogue.open(bench.storage).manifest["overlay"])
    assert removed == ["night-0001"]
    assert promote(nights, "night-0001") == 0
    back = nights.current()
    assert back is not None
    ids = pq.read_table(f"{back.export}/table")["sample_id"].to_pylist()
    assert ids == ["000000", "000001", "000002", "000004", "000005"]
    assert "000003" not in Path(str(back.report)).read_text()
    (bench.folder / "d.csv").write_text("sample_id,class\n000001,cat\n")
    config = str(bench.folder / "config.yaml")
    assert pin_labels.main([config, f"pin.file={bench.folder}/d.csv", "pin.by=ada"]) == 0
    for _ in range(2):
        assert promote(nights, "night-0001") == 0
        table = pq.read_table(f"{back.export}/table").to_pylist()
        (pinned,) = [one for one in table if one["predicted_by"] == "person"]
        assert (pinned["sample_id"], pinned["predicted_class"]) == ("000001", "cat")
    assert capsys.readouterr().out.count("night-0001: its export or page is gone or outdated") == 3


@pytest.mark.slow
def test_a_night_whose_labels_or_model_are_gone_is_refused_and_current_stays(
    nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(nights.must_find("night-0001").model).unlink()
    assert promote(nights, "night-0001") == 2
    assert "models/night-0001.pt is gone, so this night cannot be used" in capsys.readouterr().err
    assert current(nights) == "night-0002"


# --- a held training run -----------------------------------------------------------------------------


class Killed(BaseException):
    """The job ends here, as if it were killed."""


@pytest.fixture
def held(nights: NightFiles, tmp_path: Path) -> str:
    """The storage of a held run, `tiny`, beside the nights."""
    new_labels(f"{nights.storage}/labels", [0, 1], names(2)).save(held_url(nights.storage, "tiny"))
    write_record(
        nights.storage,
        RunRecord("tiny", "a1b2", {}, 1, (), {}, "", status="held", held_because=("b vanished",)),
    )
    facts = {"run": "tiny", "status": "held", "held_because": ["b vanished"], "warnings": {}, "samples": 2}
    Folder(f"{nights.storage}/runs/tiny").put("summary.json", json.dumps(facts).encode())
    return nights.storage


@pytest.mark.slow
def test_releasing_a_held_run_can_be_resumed_after_a_kill_at_any_step(
    nights: NightFiles, held: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(Lease, "put"), (Folder, "delete"), (summary, "write_facts"), (promoting, "write_record")]
    for holder, name in steps:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, _killed)
            with pytest.raises(Killed):
                promote(nights, "tiny")
    assert promote(nights, "tiny") == 0
    assert "b vanished" in capsys.readouterr().out
    assert not find_published(held, "tiny").held
    assert held_names(held) == []
    assert not Path(held_url(held, "tiny")).exists()
    record = read_record(held, "tiny")
    assert record is not None
    assert record.status == "finished"
    assert json.loads((Path(held) / "runs" / "tiny" / "summary.json").read_text())["status"] == "finished"
    assert current(nights) == "night-0002"  # nights are not affected


@pytest.mark.slow
def test_a_name_that_is_both_a_night_and_a_held_run_is_refused(
    nights: NightFiles, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(
        held, RunRecord("night-0003", "a1b2", {}, 1, (), {}, "", status="held", held_because=("b vanished",))
    )
    assert promote(nights, "night-0003") == 2
    error = capsys.readouterr().err
    assert "night-0003: both a night and a held run" in error
    assert "held runs: tiny; nights: night-0001" in error


@pytest.mark.slow
def test_a_finished_run_that_was_never_held_cannot_be_promoted(
    nights: NightFiles, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(held, RunRecord("good", "a1b2", {}, 1, (), {}, "", status="finished"))
    assert promote(nights, "good") == 2
    assert "good: no held run and no finished night" in capsys.readouterr().err


def _killed(*_: object, **__: object) -> None:
    raise Killed


def test_the_name_is_required(nights: NightFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        promote(nights)
    assert "NAME" in capsys.readouterr().err
