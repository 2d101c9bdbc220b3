"""Output paths in the folder of a submitted job, which Ray removes, are refused; other paths are not."""

from pathlib import Path

import pytest

from pencil_scale.config.command import refuse_lost
from pencil_scale.storage.errors import PencilError
from pipelines import export_labels, make_shards

LOST = ["runs/demo", "runs/shards/train-*.tar", "./page.html", "file://runs/demo", "sqlite:///runs/mlflow.db"]
KEPT = ["/lake/demo", "s3://lake/demo", "~/demo", "http://mlflow:5000", "sqlite:////lake/mlflow.db", None]


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that Ray unpacks a job in; tests/pipelines/test_job_submit.py checks its name."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("path", LOST)
def test_a_relative_path_is_refused_only_in_the_folder_of_a_job(
    path: str, job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PencilError, match=r"run.storage: .* an absolute path that every node can read"):
        refuse_lost("run.storage", "/lake/demo", path)
    monkeypatch.chdir(job_folder.parents[2])
    refuse_lost("run.storage", path)


@pytest.mark.parametrize("path", KEPT)
def test_a_path_that_outlives_the_job_is_accepted(path: str | None, job_folder: Path) -> None:
    refuse_lost("run.storage", path)


@pytest.mark.usefixtures("job_folder")
def test_jobs_refuse_before_they_write(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "configs" / "demo.yaml"
    assert make_shards.main(["digits", "runs/demo/shards"]) == 2
    assert "error: OUT: runs/demo/shards is in the folder of this job" in capsys.readouterr().err
    assert export_labels.main([str(demo)]) == 2
    assert "error: run.storage: runs/demo is in the folder of this job" in capsys.readouterr().err
    assert not Path("runs").exists()
