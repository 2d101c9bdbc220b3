"""The command `pencil-scale`: it lists and runs every job, at once, and carries the example configs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pencil_scale.config.command import as_started, program
from pencil_scale.config.loader import load_config
from pipelines.__main__ import CONFIGS, job_files, main
from pipelines.shard_making.options import EXAMPLES

JOBS = Path(__file__).parents[2] / "pipelines"


def test_every_job_is_listed_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    jobs = {path.stem for path in JOBS.glob("*.py") if "def main(" in path.read_text()} - {"__main__"}
    assert {name for name, _ in listed} == jobs | {"train", "configs"}
    assert all(about.endswith(".") for _, about in listed)


def test_help_of_every_job_answers_without_importing_torch_or_ray() -> None:
    code = (
        "import sys; from pipelines.__main__ import job_files, main\n"
        "sys.argv[0] = '/usr/bin/pencil-scale'\n"
        "for job in job_files():\n"
        "    try: main([job, '--help'])\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        "    assert not {'torch', 'ray', 'mlflow'} & set(sys.modules), job"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: pencil-scale {job} " in done.stdout for job in job_files())
    assert "python -m" not in done.stdout


@pytest.mark.parametrize(
    ("script", "train", "promote"),
    [
        ("/venv/bin/pencil-scale", "pencil-scale train", "pencil-scale promote"),
        ("/src/pipelines/init.py", "python -m pencil_scale.train", "python -m pipelines.promote"),
    ],
)
def test_messages_name_commands_in_the_form_that_started_the_program(
    script: str, train: str, promote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    assert (program("pencil_scale.train"), program("pipelines.promote")) == (train, promote)
    text = "run python -m pencil_scale.train CONFIG, then python -m pipelines.promote CONFIG NAME"
    assert as_started(text) == f"run {train} CONFIG, then {promote} CONFIG NAME"


def test_no_message_spells_a_command_by_itself() -> None:
    for path in [*JOBS.rglob("*.py"), *(JOBS.parent / "pencil_scale").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        said = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        documented = ast.get_docstring(tree, clean=False)
        for node in said:
            if isinstance(node.value, str) and node.value not in (documented, EXAMPLES):
                assert "python -m p" not in node.value, f"{path}:{node.lineno}"


def test_an_unknown_job_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index_shard"]) == 2
    assert "'index_shard' is not a job; did you mean 'index_shards'?" in capsys.readouterr().err


def test_the_rest_of_the_line_goes_to_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gone.yaml", "--dry-run"]) == 2
    assert "gone.yaml: cannot be read as a config file" in capsys.readouterr().err


def test_a_config_that_was_printed_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(names) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert main(["configs", "demo"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "mine.yaml").run.name == "demo"
    assert main(["configs", "clothing1m.yaml"]) == 0
    assert "configs/" not in capsys.readouterr().out  # a path that only a checkout has
    assert main(["configs", "nope"]) == 2
    assert "there is no 'nope'; there are cifar10" in capsys.readouterr().err
