"""promote: CURRENT goes where a person says, to any night that is kept, and stays there."""

import json
from pathlib import Path

import pytest
from catalogue_making import REST

from pencil_scale.export_files import ExportManifest, publish
from pencil_scale.nights.night_files import Night, NightFiles, Plan, night_name
from pipelines.promote import main


@pytest.fixture
def nights(tmp_path: Path) -> NightFiles:
    """Three nights, each the parent of the next; the last is held, the second in use."""
    files = NightFiles(str(tmp_path / "lake"))
    for number in (1, 2, 3):
        parent = night_name(number - 1) if number > 1 else None
        files.begin(Plan(night_name(number), f"id-{number}", number, parent, number, {}))
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
    assert "night-0009: no finished night" in capsys.readouterr().err
    assert current(nights) == "night-0002"


@pytest.mark.slow
def test_a_night_killed_before_its_last_step_does_not_undo_a_rollback(nights: NightFiles) -> None:
    nights.begin(Plan("night-0004", "id-4", 4, "night-0002", 4, {}))
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
        publish(folder, ExportManifest(labels, "a1b2", 1, "run", ("a", "b"), 0, 0, ()))
        assert promote(nights, "night-0001") == 0
        assert told in capsys.readouterr().out


def test_the_night_is_asked_for(nights: NightFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        promote(nights)
    assert "NIGHT" in capsys.readouterr().err
