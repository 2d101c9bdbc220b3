"""A run whose labels look wrong: the command holds them, no job uses them, and a person releases them."""

import html
import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import mlflow
import pytest
from training_runs import TinyData

from pencil_scale.config.command import typed
from pencil_scale.labels.run_record import ways_on
from pencil_scale.train import __main__ as train
from pipelines import balance_subset, export_labels, promote, review_report, why

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# A rate at which the network diverges: it predicts one or two classes, and the labels follow.
HOPELESS = ["stages.backbone.epochs=1", "stages.backbone.rate=20", "stages.pencil.rate=20"]
HOPELESS += ["stages.finetune.epochs=0", "stages.pencil.max_class_loss=0.1"]
HOPELESS += ["workers.count=1", "workers.in_process=true", "tracking.register_as=colours"]

Job = Callable[[Sequence[str]], int]


@dataclass
class Story:
    """What a person did after a run was held: exit codes, what was printed, and what MLflow said."""

    data: TinyData
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)

    @property
    def config(self) -> str:
        return str(self.data.folder / "config.yaml")

    def ways(self) -> list[str]:
        """What a person can do, with the config as it was typed."""
        with typed(self.config):
            return ways_on("tiny", self.summaries["held"]["corrected"])

    def do(self, step: str, job: Job, *words: str) -> None:
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            self.codes[step] = job([self.config, *words, *HOPELESS])
        self.said[step] = printed.getvalue()

    def look(self, step: str) -> None:
        storage = self.data.storage
        self.summaries[step] = self.data.summary()
        self.files[step] = [
            f"{folder}/{path.name}"
            for folder in ("published", "held")
            for path in sorted((storage / "labels" / folder).glob("*.json"))
        ]
        client = mlflow.MlflowClient(f"sqlite:///{storage}/mlflow.db", f"sqlite:///{storage}/mlflow.db")
        experiment = client.get_experiment_by_name("lake")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        (self.tags[step],) = [dict(run.data.tags) for run in runs if run.info.run_name == "tiny"]
        self.aliases[step] = sorted(client.get_registered_model("colours").aliases)


@pytest.fixture(scope="module")
def story(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(TinyData.make(tmp_path_factory.mktemp("held"), num_samples=160))
    page = f"report.page={story.data.folder}/page.html"
    story.do("held", train.main)
    story.look("held")
    story.do("again", train.main)
    story.do("export", export_labels.main)
    url = f"export.labels={story.data.storage}/labels/held/tiny.json"
    story.do("export by URL", export_labels.main, url)
    story.do("export by force", export_labels.main, "--force", f"export.folder={story.data.folder}/forced")
    story.do("subset", balance_subset.main, "subset.by=corrected", "subset.per_class=2")
    story.do("look", review_report.main, page, "report.mlflow=false")
    story.do("why", why.main, "00001")
    story.do("released", promote.main, "tiny")
    story.look("released")
    story.do("released again", promote.main, "tiny")
    story.look("released again")
    story.do("export, released", export_labels.main, "export.predict=false")
    story.do("again, released", train.main)
    story.do("warned", train.main, "run.name=warned", "gate.hold=false")
    return story


def test_a_run_that_ruins_its_labels_ends_with_exit_code_3_and_publishes_nothing(story: Story) -> None:
    assert story.codes["held"] == 3, story.said["held"]
    assert story.files["held"] == ["held/tiny.json"]
    assert story.summaries["held"]["status"] == "held"
    assert (story.data.storage / "models" / "tiny.pt").exists()


def test_the_reasons_are_the_last_lines_followed_by_what_to_do(story: Story) -> None:
    reasons = story.summaries["held"]["held_because"]
    assert any("classes lost most of their samples" in reason for reason in reasons)
    lines = story.said["held"].splitlines()
    first = lines.index(f"HELD: {reasons[0]}")
    assert lines[first : first + len(reasons)] == [f"HELD: {reason}" for reason in reasons]
    after = lines[first + len(reasons) :]
    assert after == ["The labels of tiny are not published.", *story.ways()]
    assert f"pipelines.review_report {story.config} report.labels=tiny" in after[2]
    assert f"pipelines.promote {story.config} tiny" in after[3]


def test_page_and_mlflow_say_the_same_as_the_last_lines(story: Story) -> None:
    page = html.unescape((story.data.folder / "page.html").read_text())
    for line in [*story.summaries["held"]["held_because"], *story.ways()]:
        assert line in story.tags["held"]["mlflow.note.content"]
        assert line in page


def test_a_held_run_is_not_trained_again_and_the_refusal_names_both_options(story: Story) -> None:
    assert story.codes["again"] == 3
    assert "HELD: run tiny is held" in story.said["again"]
    for words in ("classes lost most", f"pipelines.promote {story.config} tiny", "another run.name"):
        assert words in story.said["again"]


@pytest.mark.parametrize("step", ["export", "export by URL", "subset"])
def test_no_job_uses_held_labels(story: Story, step: str) -> None:
    assert story.codes[step] == 2
    assert "the labels of this run are held: " in story.said[step]
    assert f"pipelines.promote {story.config} tiny" in story.said[step]


def test_held_labels_can_be_exported_by_force(story: Story) -> None:
    assert story.codes["export by force"] == 0, story.said["export by force"]
    assert "WARNING: HELD LABELS ARE EXPORTED (--force): " in story.said["export by force"]
    manifest = json.loads((story.data.folder / "forced" / "manifest.json").read_text())
    assert manifest["held_because"] == story.summaries["held"]["held_because"]


def test_held_labels_can_be_reviewed(story: Story) -> None:
    assert (story.codes["look"], story.codes["why"]) == (0, 0), story.said["look"] + story.said["why"]
    assert "These labels are held: " in (story.data.folder / "page.html").read_text()
    assert "tiny (held)" in story.said["why"]


def test_promote_publishes_the_labels_and_may_be_repeated(story: Story) -> None:
    for step in ("released", "released again"):
        assert story.codes[step] == 0, story.said[step]
        assert story.files[step] == ["published/tiny.json"]
        assert story.summaries[step]["status"] == "finished"
        assert f"{story.data.storage}/labels/published/tiny.json" in story.said[step]
    assert story.data.record()["status"] == "finished"
    assert "classes lost most of their samples" in story.said["released"]


def test_released_labels_are_used_and_the_name_is_finished(story: Story) -> None:
    assert story.codes["export, released"] == 0, story.said["export, released"]
    assert story.codes["again, released"] == 2
    assert "run tiny is finished" in story.said["again, released"]


def test_a_gate_that_only_warns_publishes_and_warns_in_the_last_line(story: Story) -> None:
    assert story.codes["warned"] == 0, story.said["warned"]
    assert (story.data.storage / "labels" / "published" / "warned.json").exists()
    summary = story.data.summary("warned")
    assert (summary["status"], summary["held_because"]) == ("finished", [])
    assert story.said["warned"].splitlines()[-1] == f"WARNING: {summary['warnings']['gate']}"


def test_mlflow_shows_that_labels_are_held_and_gives_the_alias_on_release(story: Story) -> None:
    assert story.tags["held"]["labels"] == "held"
    assert "classes lost most" in story.tags["held"]["labels.held_because"]
    assert story.aliases["held"] == []
    assert story.tags["released"]["labels"] == "released"
    assert story.aliases["released"] == ["current"]
