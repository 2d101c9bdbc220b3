"""The demo rebuilds its folder, so it must not start by accident or remove files of others."""

from pathlib import Path

import pytest

from pipelines import demo


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("configs/mine.yaml", 2)])
def test_asking_for_help_or_giving_an_argument_removes_nothing(
    argument: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "runs" / "demo" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        demo.main([argument])
    assert ended.value.code == code
    assert kept.exists()


@pytest.mark.parametrize("theirs", ["runs/mine/run.json", "labels/pins/a.parquet", "nights/CURRENT"])
def test_the_demo_does_not_remove_what_a_user_made_in_its_folder(theirs: str, tmp_path: Path) -> None:
    for name in ("shards/train-000000.tar", "runs/demo/run.json", theirs):
        (tmp_path / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "demo" / name).write_text("{}")
    with pytest.raises(
        demo.PencilError, match=f"contains {theirs.rpartition('/')[0]}, which the demo would remove"
    ):
        demo.clear(tmp_path / "demo")
    assert (tmp_path / "demo" / theirs).exists()


def test_the_output_of_an_earlier_demo_is_removed(tmp_path: Path) -> None:
    for name in ("shards/train-000000.tar", "runs/demo/run.json", "labels/published/demo.json"):
        (tmp_path / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "demo" / name).write_text("{}")
    demo.clear(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
    demo.clear(tmp_path / "demo")  # the first demo on a machine
