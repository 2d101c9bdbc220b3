"""The demo makes its folder anew, so it must not begin for somebody who only asks."""

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
