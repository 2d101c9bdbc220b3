"""promote: CURRENT goes where a person says, to any night that is kept; and held labels are released."""

import json
from pathlib import Path

import pytest
from catalogue_making import REST

from pencil_scale.export_files import ExportManifest, publish
from pencil_scale.label_table import LabelTable
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_store import PartStore
from pencil_scale.labels.published import find_published, held_names, held_url
from pencil_scale.nights.night_files import Night, NightFiles, Plan, night_name
from pencil_scale.running import summary
from pencil_scale.running.run_record import RunRecord, read_record, write_record
from pencil_scale.running.summary import write_facts
from pipelines import promote as promoting
from pipelines.promote import main


@pytest.fixture
def nights(tmp_path: Path) -> NightFiles:
    """Three nights, each the parent of the next; the last is held, the second in use."""
    files = NightFiles(str(tmp_path / "lake"))
    for number in (1, 2, 3):
        parent = night_name(number - 1) if number > 1 else None
        files.begin(Plan(night_name(number), number, parent, number, {}))
        verdict = "held" if number == 3 else "passed"
        reasons = ("the class balance jumped",) if number == 3 else ()
        night = Night(night_name(number), number, parent, number, ("a", "b"), "labels", "model", "run")
        files.save(Night(**{**vars(night), "verdict": verdict, "reasons": reasons}))
        files.close(night.name, verdict)
    files.move_current(files.must_find("night-0002"), expected=None)
    (tmp_path / "classes.txt").write_text("a\nb\n")
    head = {"run": {"name": "n", "storage": files.storage}}
    head["data"] = {"shards": f"{tmp_path}/*.tar", "classes": f"{tmp_path}/classes.txt"}
    text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items())
    (tmp_path / "config.yaml").write_text(text + REST)
    return files


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
    assert promote(nights, "night-0001") == 0  # again, after a kill


@pytest.mark.slow
def test_an_unknown_night_is_refused_with_the_names_of_those_kept(
    nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(nights, "night-0009") == 2
    told = capsys.readouterr().err
    assert "night-0009: no held run and no finished night" in told
    assert "held runs: none; nights: night-0001, night-0002, night-0003" in told
    assert current(nights) == "night-0002"


@pytest.mark.slow
def test_a_night_killed_before_its_last_step_does_not_undo_a_rollback(nights: NightFiles) -> None:
    nights.begin(Plan("night-0004", 4, "night-0002", 4, {}))
    nights.save(Night("night-0004", 4, "night-0002", 4, ("a", "b"), "labels", "model", "run"))
    assert nights.unclosed() is not None  # it would go on, and take CURRENT
    assert promote(nights, "night-0002") == 0
    assert nights.unclosed() is None


@pytest.mark.slow
def test_an_export_that_was_made_by_hand_is_found_and_one_of_other_labels_is_not(
    nights: NightFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"{nights.storage}/exports/night-0001"
    for labels, told in (("others", "no export of these labels was found"), ("labels", f"export   {folder}")):
        publish(folder, ExportManifest(labels, 1, "run", ("a", "b"), 0, 0, ()))
        assert promote(nights, "night-0001") == 0
        assert told in capsys.readouterr().out


# --- a held training run -----------------------------------------------------------------------------


class Killed(BaseException):
    """The job ends here, as if it were killed."""


@pytest.fixture
def held(nights: NightFiles, tmp_path: Path) -> str:
    """The storage of a held run, `tiny`, beside the nights."""
    table = LabelTable.create(tmp_path / "table", [0, 1], 2)
    table.snapshot(f"{nights.storage}/labels").save(held_url(nights.storage, "tiny"))
    write_record(nights.storage, RunRecord("tiny", {}, 1, "", status="held", held_because=("b vanished",)))
    facts = {"run": "tiny", "status": "held", "held_because": ["b vanished"], "warnings": {}, "samples": 2}
    write_facts(nights.storage, "tiny", facts)
    return nights.storage


@pytest.mark.slow
def test_the_release_of_a_held_run_completes_whichever_step_it_is_killed_in(
    nights: NightFiles, held: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(Manifest, "save"), (PartStore, "delete"), (summary, "write_facts"), (promoting, "write_record")]
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
    assert current(nights) == "night-0002"  # the nights go their own way


@pytest.mark.slow
def test_a_name_that_is_both_a_night_and_a_held_run_is_refused(
    nights: NightFiles, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(held, RunRecord("night-0003", {}, 1, "", status="held", held_because=("b vanished",)))
    assert promote(nights, "night-0003") == 2
    told = capsys.readouterr().err
    assert "night-0003: both a night and a held run" in told
    assert "held runs: tiny; nights: night-0001" in told


@pytest.mark.slow
def test_a_finished_run_that_was_never_held_is_nothing_to_promote(
    nights: NightFiles, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(held, RunRecord("good", {}, 1, "", status="finished"))
    assert promote(nights, "good") == 2
    assert "good: no held run and no finished night" in capsys.readouterr().err


def _killed(*_: object, **__: object) -> None:
    raise Killed


def test_a_name_is_asked_for(nights: NightFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        promote(nights)
    assert "NAME" in capsys.readouterr().err
