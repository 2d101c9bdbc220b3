"""A week of nights: the crawl grows, is damaged, poisoned, rolled back and killed; CURRENT is checked."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds
import pytest
from night_making import Crawl, started
from training_runs import started as started_command

from pencil_scale.config.settings import Config
from pencil_scale.labels.columns import FREE, WATCHED
from pencil_scale.labels.manifest import Manifest, visited
from pencil_scale.labels.published import PublishedLabels, find_published
from pencil_scale.labels.table import LabelTable
from pencil_scale.nights.guard_rails import Findings
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.nights.start import run_facts
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import LeaseHeldError
from pencil_scale.storage.retries import UnreachableError
from pencil_scale.subset.files import read_table, read_words
from pipelines import export_labels, night_outputs, promote, reclean_nightly

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


EVIDENCE = ("evidence.watched=0.3", "evidence.planted=0.2", "stages.backbone.epochs=3", "gate.hold=false")


class Killed(BaseException):
    """The job ends here, as if it were killed."""


@dataclass
class Week:
    """Consecutive nights, and what was observed after each step."""

    crawl: Crawl
    codes: dict[str, int] = field(default_factory=dict)
    current: dict[str, str | None] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)  # the night whose model is in use
    tags: dict[str, dict[str, str]] = field(default_factory=dict)  # of every night's MLflow run
    nights: dict[str, Night] = field(default_factory=dict)
    tables: dict[str, LabelTable] = field(default_factory=dict)

    def night(self, step: str, *overrides: str) -> None:
        self.codes[step] = reclean_nightly.main([str(self.crawl.config), *overrides])
        self._look(step)

    def promote(self, step: str, name: str) -> None:
        self.codes[step] = promote.main([str(self.crawl.config), name])
        self._look(step)

    def _look(self, step: str) -> None:
        files = self.crawl.nights
        self.current[step] = self.crawl.current
        self.nights |= {night.name: night for night in files.nights()}
        for night in files.nights():
            if night.name not in self.tables:
                self.tables[night.name] = self.table(night)
        self._ask_mlflow(step)

    def table(self, night: Night) -> LabelTable:
        return LabelTable.restore(Manifest.load(night.labels), self.crawl.folder / "tables" / night.name)

    def _ask_mlflow(self, step: str) -> None:
        from mlflow import MlflowClient

        uri = f"sqlite:///{self.crawl.folder}/lake/mlflow.db"
        client = MlflowClient(uri, uri)
        experiment = client.get_experiment_by_name("lake")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        self.tags = {str(run.info.run_name): dict(run.data.tags) for run in runs}
        version = client.get_model_version_by_alias("colours", "current")
        (self.alias[step],) = [run.info.run_name for run in runs if run.info.run_id == version.run_id]

    def rows(self, name: str) -> npt.NDArray[np.int64]:
        """The rows a night trained on."""
        folder = self.crawl.nights.path(name, "rows")
        words = read_words(folder)
        assert words is not None
        return np.sort(read_table(folder, words)["row"].to_numpy())


@pytest.fixture(scope="module")
def week(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Week:
    week = Week(Crawl(tmp_path_factory.mktemp("week")))
    crawl = week.crawl
    crawl.add(0)
    crawl.add(1)
    week.night("first")
    week.night("nothing new")
    whole = crawl.add(2).read_bytes()
    crawl.add(2, whole[: len(whole) // 2])
    week.night("damaged")
    crawl.add(2, whole)
    week.night("mended")
    crawl.add(3, renamed={"yellow": "golden"})
    week.night("poisoned")
    week.night("still poisoned")
    named = ["export.labels=night-0003", f"export.folder={crawl.folder}/exported"]
    week.codes["exported"] = export_labels.main([str(crawl.config), *named])
    week.codes["exported by force"] = export_labels.main([str(crawl.config), *named, "--force"])
    week.promote("released", "night-0003")
    crawl.add(4)
    killed_in_training(week)
    week.night("killed")
    week.promote("rolled back", "night-0002")
    crawl.add(3)
    for number in (5, 6, 7):
        crawl.add(number)
    (crawl.folder / "crawl-000.tar").unlink()
    week.night("after the rollback", "workers.in_process=false", *EVIDENCE)
    return week


def killed_in_training(week: Week) -> None:
    """Start the command as cron does, and kill it after one epoch."""
    words = [sys.executable, "-m", "pipelines.reclean_nightly", str(week.crawl.config)]
    with started_command(words, week.crawl.folder / "killed.log") as command:
        command.wait_for("pencil    epoch 1/2")
        command.kill()


def test_the_first_night_trains_all_samples_and_is_current(week: Week) -> None:
    assert (week.codes["first"], week.current["first"], week.alias["first"]) == (
        0,
        "night-0001",
        "night-0001",
    )
    night = week.nights["night-0001"]
    assert night.parent is None
    assert night.figures["clean_accuracy"] > 0.5


def test_if_nothing_is_new_no_night_is_made(week: Week) -> None:
    assert week.codes["nothing new"] == 0
    assert week.current["nothing new"] == "night-0001"
    assert week.nights["night-0002"].catalogue_version == 2  # night 2 was made for the next shard


def test_a_damaged_shard_ends_the_night_and_changes_nothing(week: Week) -> None:
    assert week.codes["damaged"] == 2
    assert week.current["damaged"] == "night-0001"
    assert (week.codes["mended"], week.current["mended"]) == (0, "night-0002")


def test_a_night_trains_on_what_is_new_and_on_as_many_old_rows(week: Week) -> None:
    rows = week.rows("night-0002")
    assert rows[rows >= 160].tolist() == list(range(160, 240))
    assert (rows < 160).sum() == 80
    assert (
        np.flatnonzero(visited(Manifest.load(week.nights["night-0002"].labels), 1)).tolist() == rows.tolist()
    )


def test_labels_that_were_not_trained_on_are_bit_for_bit_those_of_the_parent(week: Week) -> None:
    for name, parent in (("night-0002", "night-0001"), ("night-0004", "night-0003")):
        before, after = week.tables[parent], week.tables[name]
        rest = np.setdiff1d(np.arange(before.layout.num_rows), week.rows(name))
        assert len(rest) > 50
        assert before.read(rest).tobytes() == after.read(rest).tobytes()
        learned = week.rows(name)[week.rows(name) < before.layout.num_rows]
        assert (before.read(learned) != after.read(learned)).any()


def test_a_poisoned_night_is_held_with_its_reason_and_current_stays(week: Week) -> None:
    assert (week.codes["poisoned"], week.current["poisoned"]) == (3, "night-0002")
    assert week.alias["poisoned"] == "night-0002"
    night = week.nights["night-0003"]
    assert night.status == "held"
    assert "no usable label" in night.reasons[0]


def test_a_held_night_is_not_trained_again_but_the_exit_code_stays_3(week: Week) -> None:
    assert (week.codes["still poisoned"], week.current["still poisoned"]) == (3, "night-0002")


def test_the_labels_of_a_held_night_are_exported_by_force_only(week: Week) -> None:
    assert (week.codes["exported"], week.codes["exported by force"]) == (2, 0)
    assert find_published(week.crawl.nights.storage, "night-0003").held_because == ()  # it was promoted


def test_a_held_night_that_is_promoted_is_the_parent_of_the_next(week: Week) -> None:
    assert (week.codes["released"], week.current["released"]) == (0, "night-0003")
    assert week.alias["released"] == "night-0003"
    assert week.nights["night-0004"].parent == "night-0003"


def test_a_night_that_was_killed_resumes_under_its_name(week: Week) -> None:
    assert (week.codes["killed"], week.current["killed"]) == (0, "night-0004")
    rows = week.rows("night-0004")
    manifest = Manifest.load(week.nights["night-0004"].labels)
    assert np.flatnonzero(visited(manifest, 1)).tolist() == rows.tolist()
    assert manifest.newest_epoch == manifest.first_epoch + 1
    assert run_facts(week.crawl.nights.storage, "night-0004")["coverage"] == [1.0, 1.0]


def test_after_a_rollback_the_next_night_starts_there_with_everything_added_since(week: Week) -> None:
    assert (week.current["rolled back"], week.alias["rolled back"]) == ("night-0002", "night-0002")
    assert (week.codes["after the rollback"], week.current["after the rollback"]) == (0, "night-0005")
    night = week.nights["night-0005"]
    assert night.parent == "night-0002"
    shards = {name: night.figures[name] for name in ("new_shards", "changed_shards", "vanished_shards")}
    assert shards == {"new_shards": 5, "changed_shards": 0, "vanished_shards": 1}
    assert (night.figures["new_samples"], night.figures["vanished_samples"]) == (400, 80)
    rows = week.rows("night-0005")
    assert rows[rows < 240].min() >= 80  # those that vanished cannot be read


def watched_rows(week: Week) -> npt.NDArray[np.int64]:
    return np.flatnonzero(week.tables["night-0005"].read(range(640), "role") == WATCHED)


def test_a_night_that_switches_evidence_on_watches_only_samples_that_no_night_trained_on(week: Week) -> None:
    rows, watched, table = week.rows("night-0005"), watched_rows(week), week.tables["night-0005"]
    assert 90 < len(watched) < 150
    assert sorted([*rows[rows >= 240], *watched]) == list(range(240, 640))
    assert (table.read(watched, "last_epoch") == 0).all()
    assert not np.isnan(table.read(watched, "predicted_log_p")).any()
    new, old = rows[rows >= 240], rows[rows < 240]
    assert (table.read(new, "last_epoch") == table.manifest.newest_epoch).all()
    assert (table.read(old, "last_epoch") < table.manifest.first_epoch).all()  # decided by another night
    facts = run_facts(week.crawl.nights.storage, "night-0005")
    assert (facts["samples"], facts["watched"]) == (len(rows), len(watched))
    assert facts["planted"] >= 30
    assert facts["gain_low"] <= facts["gain"] <= facts["gain_high"]


def test_labels_that_earlier_nights_decided_stay_and_no_error_remains_planted(week: Week) -> None:
    parent, tonight = (
        PublishedLabels(Manifest.load(week.nights[name].labels)) for name in ("night-0002", "night-0005")
    )
    assert tonight.manifest.noise is not None
    before, after = parent.rows(range(240)), tonight.rows(range(240))
    was, now = (one.decide().corrected_class for one in (before, after))
    assert was.tolist() == now.tolist()
    assert set(tonight.rows(range(640)).role.tolist()) == {FREE, WATCHED}
    assert after.noisy_class.tolist() == before.noisy_class.tolist()


def test_mlflow_shows_for_every_night_how_it_ended(week: Week) -> None:
    found = {name: tags.get("night") for name, tags in week.tags.items() if name in week.nights}
    assert found["night-0005"] == "current"
    assert {found[f"night-000{number}"] for number in (1, 2, 3, 4)} == {"former"}
    assert "class balance" in week.tags["night-0003"]["night.reasons"]
    assert week.alias["after the rollback"] == "night-0005"


def test_everything_a_kept_night_names_exists_and_old_nights_are_gone(week: Week) -> None:
    kept = ["night-0002", "night-0003", "night-0004", "night-0005"]
    assert [night.name for night in week.crawl.nights.nights()] == kept
    lake = week.crawl.folder / "lake"
    assert [str(path) for path in lake.rglob("*night-0001*")] == []
    for name in kept:
        night = week.nights[name]
        for url in (night.labels, night.model, night.report):
            assert Path(str(url)).exists()
        assert week.table(night).read([0]).tobytes() == week.tables[name].read([0]).tobytes()
    assert list((lake / "checkpoints").glob("*")) == []


def test_the_page_of_a_night_shows_what_changed_since_its_parent(week: Week) -> None:
    assert "night-0002" in Path(str(week.nights["night-0005"].report)).read_text()


def test_an_export_gives_the_epoch_of_a_change_only_for_its_own_night(week: Week) -> None:
    table = exported(week.nights["night-0004"], "row", "last_change_epoch", "is_label_issue")
    changed = {row for row, epoch in zip(table["row"], table["last_change_epoch"], strict=True) if epoch == 0}
    issues = {row for row, issue in zip(table["row"], table["is_label_issue"], strict=True) if issue}
    trained = set(week.rows("night-0004").tolist())
    assert changed
    assert changed <= trained
    assert issues - trained  # repaired in an earlier night and unchanged in this one


def exported(night: Night, *columns: str) -> dict[str, list[Any]]:
    return ds.dataset(f"{night.export}/table").to_table(list(columns)).to_pydict()


def test_a_second_job_on_the_same_nights_is_refused(week: Week) -> None:
    with week.crawl.nights.leased(), pytest.raises(LeaseHeldError, match="are being changed by another"):
        reclean_nightly.run(week.crawl.settings())


def test_a_takedown_makes_a_night_without_training_even_if_killed_at_any_step(
    week: Week, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = f"{watched_rows(week)[0]:06d}"
    (week.crawl.folder / "gone.txt").write_text(f"000100\n{watched}\n")
    overrides = [f"data.exclude={week.crawl.folder}/gone.txt"]
    steps: list[tuple[Any, str]] = [(reclean_nightly, "_check"), (night_outputs.review_report, "run")]
    steps += [(NightFiles, "save"), (NightFiles, "move_current"), (NightFiles, "save")]
    for holder, name in steps:  # it is saved first when it is made, and then when it is closed
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, _killed)
            with pytest.raises(Killed):
                reclean_nightly.run(week.crawl.settings(*overrides))
    unclosed = week.crawl.nights.unclosed()
    assert unclosed is not None
    assert (unclosed.status, week.crawl.current) == ("passed", "night-0006")  # only its last step is missing
    summary = reclean_nightly.run(week.crawl.settings(*overrides))
    assert (summary.status, summary.current) == ("current", "night-0006")
    assert (summary.night.trained_by, summary.night.parent) == ("night-0005", "night-0005")
    ids = exported(summary.night, "sample_id")["sample_id"]
    assert not {"000100", watched} & set(ids)
    assert "000101" in ids
    exported_nights = [night.name for night in week.crawl.nights.nights() if Path(str(night.export)).exists()]
    assert exported_nights == ["night-0006"]  # the others still showed it


def test_a_takedown_takes_effect_even_if_the_new_night_is_held(
    week: Week, monkeypatch: pytest.MonkeyPatch
) -> None:
    (week.crawl.folder / "gone.txt").write_text(f"000100\n{watched_rows(week)[0]:06d}\n000102\n")
    monkeypatch.setattr(reclean_nightly, "_check", lambda *_: Findings({}, reasons=("looks wrong",)))
    overrides = [f"data.exclude={week.crawl.folder}/gone.txt"]
    summary = reclean_nightly.run(week.crawl.settings(*overrides))
    assert (summary.status, summary.current) == ("held", "night-0006")
    current = week.crawl.nights.current()
    assert current is not None
    for night in (current, summary.night):
        ids = exported(night, "sample_id")["sample_id"]
        assert "000102" not in ids
        assert "000101" in ids
        assert "000102" not in Path(str(night.report)).read_text()


def test_a_first_night_that_learned_nothing_is_held_by_the_gate_for_runs(
    ray_session: None, tmp_path: Path
) -> None:
    crawl = Crawl(tmp_path)
    crawl.add(0)
    hopeless = ["stages.backbone.rate=20", "stages.pencil.rate=20", "nightly.first_epochs=[1,1,0]"]
    summary = reclean_nightly.run(crawl.settings(*hopeless))
    assert (summary.status, summary.current) == ("held", None)
    assert any("not clearly better than chance" in reason for reason in summary.night.reasons)
    assert Path(summary.night.labels) == tmp_path / "lake" / "labels" / "published" / "night-0001.json"
    assert not (tmp_path / "lake" / "labels" / "held").exists()
    assert promote.main([str(crawl.config), "night-0001"]) == 0
    assert crawl.current == "night-0001"


def _killed(*_: object, **__: object) -> None:
    raise Killed


def test_a_night_that_was_refused_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl, tried = Crawl(tmp_path), []

    def refuse(config: Config, nights: NightFiles, night: Night) -> None:
        tried.append((night.name, night.catalogue_version))
        raise PencilError("too many images cannot be decoded")

    monkeypatch.setattr(reclean_nightly, "_make", refuse)
    crawl.add(0)
    assert reclean_nightly.main([str(crawl.config)]) == 2
    refused = crawl.nights.record("night-0001")
    assert refused is not None
    assert (refused.status, refused.reasons) == ("refused", ("too many images cannot be decoded",))
    assert reclean_nightly.main([str(crawl.config)]) == 2  # nothing has changed: tried again
    crawl.add(1)
    assert reclean_nightly.main([str(crawl.config)]) == 2
    assert tried == [("night-0001", 1), ("night-0001", 1), ("night-0002", 2)]


def test_an_outage_does_not_refuse_a_night_and_the_next_command_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl, tried = Crawl(tmp_path), []

    def lose_the_store(config: Config, nights: NightFiles, night: Night) -> None:
        tried.append((night.name, night.catalogue_version))
        raise UnreachableError("s3://lake/x: unreachable for 600 s")

    monkeypatch.setattr(reclean_nightly, "_make", lose_the_store)
    for part in range(2):
        crawl.add(part)
        assert reclean_nightly.main([str(crawl.config)]) == 2
    assert tried == [("night-0001", 1), ("night-0001", 1)]
    night = crawl.nights.record("night-0001")
    assert night is not None
    assert night.status != "refused"


def test_settings_that_do_not_go_together_are_refused_before_a_night_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crawl = Crawl(tmp_path)
    crawl.add(0)
    assert reclean_nightly.main([str(crawl.config), "optimizer.precision=bf16"]) == 2
    assert "workers.gpu: false, but optimizer.precision=bf16 is for GPUs" in capsys.readouterr().err
    assert crawl.nights.records() == []


def test_a_night_never_takes_a_name_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crawl, tried = Crawl(tmp_path), []

    def refuse(config: Config, nights: NightFiles, night: Night) -> None:
        tried.append(night.name)
        raise PencilError("enough")

    monkeypatch.setattr(reclean_nightly, "_make", refuse)
    crawl.add(0)
    for name in ("models/night-0001.pt", "labels/published/night-0002.json"):
        (tmp_path / "lake" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lake" / name).write_text("of another run")
    assert reclean_nightly.main([str(crawl.config)]) == 2
    assert tried == ["night-0003"]


def test_a_storage_whose_current_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crawl = Crawl(tmp_path)
    crawl.add(0)
    crawl.nights.save(started(1, status="passed", class_names=("a", "b")))
    assert reclean_nightly.main([str(crawl.config)]) == 2
    assert "nights/CURRENT is gone, but night-0001 is there" in capsys.readouterr().err
