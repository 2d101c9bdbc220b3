"""What is checked before a worker starts: the config against the index, class lists, samples taken down."""

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from catalogue_making import CLASSES, Bench, samples

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.labels.roles import Roles
from pencil_scale.labels.run_record import RunRecord, write_record
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.subset.files import MEMBERS, SubsetWords, write_subset
from pencil_scale.train.checks import require_agreement
from pencil_scale.train.plan import count, estimate, make_plan
from pencil_scale.train.run import _copy_weights, _start_or_resume


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    for number in range(3):
        bench.shard(f"{number}.tar", samples(range(number * 10, number * 10 + 10)))
    (tmp_path / "gone.txt").write_text("000003\n")
    (tmp_path / "turned.txt").write_text("bee\nant\ncat\n")
    (tmp_path / "shards.txt").write_text(f"{tmp_path}/0.tar\n{tmp_path}/{{1..2}}.tar\n")
    bench.index()
    return bench


def config(bench: Bench, *overrides: str) -> Config:
    return load_config(bench.folder / "config.yaml", overrides)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.identity=shard_key", "data.identity: found shard_key, the catalogue was indexed with key"),
        ("data.label=json:name", "data.label: found json:name, the catalogue was indexed with cls"),
        (
            "data.classes={}/turned.txt",
            "turned.txt has the same names in another order: class 0 is 'bee', not 'ant'",
        ),
        ("data.exclude={}/gone.txt", "gone.txt is not the list the catalogue was indexed with; its samples"),
        ("data.shards={}/nowhere.tar", "names none of the catalogue's 3 shards, such as .*0.tar"),
        ("data.shards={}/x/*.tar", "names none of the catalogue's 3 shards, such as .*0.tar"),
    ],
)
def test_a_config_changed_since_indexing_is_refused_by_its_key(
    bench: Bench, override: str, says: str
) -> None:
    with pytest.raises(PencilError, match=says) as refused:
        require_agreement(config(bench, override.format(bench.folder)))
    assert "run `python -m pipelines.index_shards` again" in str(refused.value)


@pytest.mark.parametrize(
    "shards", ["{}/*.tar", "{}/{{0..2}}.tar", "{}/{{0..7}}.tar", "@{}/shards.txt", "file://{}/*.tar"]
)
def test_the_same_shards_may_be_spelled_in_another_way(
    bench: Bench, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    require_agreement(config(bench, "data.shards=" + shards.format(bench.folder)))
    assert capsys.readouterr().out == ""


def test_shards_removed_from_the_list_are_noted_but_not_refused_because_they_keep_their_rows(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # before it is indexed with fewer, and after: their rows stay
        require_agreement(config(bench, f"data.shards={bench.folder}/[01].tar"))
        (line,) = [text for text in capsys.readouterr().out.splitlines() if "not named here" in text]
        assert "1 of the catalogue's 3 shards are not named here, such as" in line
        assert "2.tar; they keep their rows and are trained on too" in line
        require_agreement(config(bench, f"data.shards={bench.folder}/[01].tar", "data.subset=some"))
        assert "not named here" not in capsys.readouterr().out  # the subset says what is trained on
        assert bench.index(shards=f"{bench.folder}/[01].tar").catalogue.num_ok == 30


def test_a_list_to_exclude_that_was_indexed_is_agreed_on_until_it_changes(bench: Bench) -> None:
    gone = bench.folder / "gone.txt"
    bench.index(exclude=str(gone))
    require_agreement(config(bench))
    gone.write_text("000003\n000004\n")
    with pytest.raises(PencilError, match="not the list the catalogue was indexed with"):
        require_agreement(config(bench))
    with pytest.raises(PencilError, match="cannot be read"):
        require_agreement(config(bench, f"data.exclude={bench.folder}/nowhere.txt"))


# A run that started with the first catalogues, and is evaluated on the test set.
STARTED = RunRecord("tiny", "a1b2", {}, 1, CLASSES, {"test": 1}, "labels.json")


class CheckBench(Bench):
    """Six samples to train on and six to evaluate with; their labels are names."""

    def indexed(self, **data: object) -> Config:
        shards = {"shards": f"{self.folder}/a.tar", "label": "json:name"}
        self.index(**{**shards, "test": f"{self.folder}/clean.tar", **data})
        return load_config(self.folder / "config.yaml", ["images.crop=4"])


@pytest.fixture
def checks(tmp_path: Path) -> CheckBench:
    found = CheckBench(tmp_path)
    found.shard("a.tar", samples(range(6)))
    found.shard("clean.tar", samples(range(50, 56)))
    return found


def test_a_run_resumes_only_with_the_class_list_of_its_own_catalogue(checks: CheckBench) -> None:
    checks.indexed()
    (checks.folder / "classes.txt").write_text("cat\nant\nbee\n")
    config = checks.indexed()
    assert make_plan(config).class_names == ("cat", "ant", "bee")
    with pytest.raises(PencilError, match=r"same names in another order.*restore the list of .* version 1"):
        make_plan(config, record=STARTED)


def test_a_clean_set_of_another_class_list_is_refused(checks: CheckBench) -> None:
    """It was indexed before the list was reordered, and left out of the config since."""
    checks.indexed()
    (checks.folder / "classes.txt").write_text("cat\nant\nbee\n")
    config = checks.indexed(test=None)
    with pytest.raises(
        PencilError, match=r"data.test: the class list of its catalogue, version 1, has the same"
    ):
        make_plan(config, record=replace(STARTED, catalogue_version=2))


def test_a_clean_set_of_other_shards_than_were_indexed_is_refused_until_its_catalogue_is_made_again(
    checks: CheckBench,
) -> None:
    checks.indexed()
    checks.shard("other.tar", samples(range(60, 64)))
    other = f"{checks.folder}/other.tar"
    changed = load_config(checks.folder / "config.yaml", ["images.crop=4", f"data.test={other}"])
    for config in (changed, checks.indexed(test=other)):
        with pytest.raises(PencilError, match=r"data.test: 1 of [12] shards? in its catalogue are not named"):
            make_plan(config)
    files, root = fsspec.core.url_to_fs(checks.storage)
    files.rm(f"{root}/catalogue/test", recursive=True)
    assert make_plan(checks.indexed(test=other)).clean["test"].version == 1


def test_samples_that_were_taken_down_leave_a_run_that_started_before(checks: CheckBench) -> None:
    exclude = checks.folder / "exclude.txt"
    exclude.write_text("")
    checks.indexed(exclude=str(exclude))
    exclude.write_text("000002\n000051\n")
    config = checks.indexed(exclude=str(exclude))
    plan = make_plan(config, record=STARTED)
    assert plan.stream.subset is not None
    assert plan.stream.subset.tolist() == [0, 1, 3, 4, 5]
    assert "left out 1 more sample, taken down since" in plan.lines[-1]
    clean = plan.clean["test"]
    assert clean.subset is not None
    assert clean.subset.tolist() == [0, 2, 3, 4, 5]
    newest = make_plan(config)  # a new run has the catalogue that knows it
    assert newest.stream.subset is None
    assert newest.catalogue.num_ok == Catalogue.open(checks.storage).num_ok == 5


def test_clean_images_that_are_trained_on_under_other_ids_are_no_evidence(checks: CheckBench) -> None:
    copies = [(f"copy-{name}", body) for name, body in samples(range(3))]
    checks.shard("clean.tar", [*copies, *samples(range(50, 56))])
    config = checks.indexed()
    settings = ["images.crop=4", "evidence.clean=test", "evidence.watched=null"]
    proving = load_config(checks.folder / "config.yaml", settings)
    with pytest.raises(PencilError, match=r"3 of 9 images of data.test are trained on too.* such as 000000;"):
        make_plan(proving)
    make_plan(config)
    make_plan(proving, record=STARTED)  # a run that has begun is not ended by it
    exclude = checks.folder / "exclude.txt"
    exclude.write_text("000000\n000001\n000002\n")
    checks.indexed(exclude=str(exclude))
    make_plan(load_config(checks.folder / "config.yaml", settings))


def test_a_resumed_run_keeps_its_automatic_numbers_and_its_global_batch(checks: CheckBench) -> None:
    checks.indexed()
    path = checks.folder / "config.yaml"
    path.write_text(path.read_text().partition("model:")[0])
    first = make_plan(load_config(path))
    assert first.automatic["stages.backbone.epochs"] == first.config.stages.backbone.epochs == 25
    assert "stages.backbone.epochs 25" in first.lines[2]
    stored = {**first.automatic, "stages.backbone.epochs": 7}  # say, of an older version of the program
    again = make_plan(load_config(path, ["workers.count=2"]), record=replace(STARTED, automatic=stored))
    assert again.config.stages.backbone.epochs == 7
    assert (first.config.optimizer.batch_per_worker, again.config.optimizer.batch_per_worker) == (16, 8)


def test_a_crop_that_is_larger_than_the_images_is_refused_before_the_start(checks: CheckBench) -> None:
    checks.indexed()
    with pytest.raises(PencilError, match=r"images.crop: 8, but the images have 4x4 pixels"):
        make_plan(load_config(checks.folder / "config.yaml", ["images.crop=8"]))


def test_a_run_keeps_the_weights_it_starts_from(checks: CheckBench) -> None:
    checks.indexed()
    original = checks.folder / "pretrained.pt"
    weights = build_backbone("small_convnet", 3).state_dict()
    torch.save(weights, original)
    config = load_config(checks.folder / "config.yaml", [f"model.weights={original}"])
    kept = _copy_weights(config)
    original.unlink()
    again = build_backbone("small_convnet", 3, kept).state_dict()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    inside = load_config(checks.folder / "config.yaml", [f"model.weights={kept}"])
    assert _copy_weights(inside) == kept  # a model of the storage itself, such as a night's parent


def test_a_run_that_failed_before_its_first_checkpoint_starts_again_with_corrected_settings(
    checks: CheckBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ensure_ray", "require_room"):
        monkeypatch.setattr(f"pencil_scale.train.run.{name}", lambda *_: None)
    checks.indexed()
    storage = checks.storage

    def start(*overrides: str) -> RunRecord:
        config = load_config(checks.folder / "config.yaml", ["images.crop=4", *overrides])
        with Lease.hold(storage, "runs/t/lease", what="a test") as lease:
            _, record = _start_or_resume(config, None, lease)
        return record

    first = start()
    assert start() == first  # the same settings resume it
    second = start("stages.backbone.rate=0.01")
    assert second.id != first.id
    assert "starts again: it had not saved anything" in capsys.readouterr().out
    checks.shard("a.tar", samples(range(7)))
    checks.indexed()
    third = start("stages.backbone.rate=0.01")  # indexed again: on the new catalogue
    assert (second.catalogue_version, third.catalogue_version) == (1, 2)
    write_record(storage, replace(third, decoders="pillow 1.0"))
    fourth = start("stages.backbone.rate=0.01")  # an image library was updated
    assert fourth.id != third.id
    assert fourth.decoders == third.decoders
    monkeypatch.setattr("pencil_scale.train.run._is_saved", lambda *_: True)
    with pytest.raises(PencilError, match=r"was started with stages.backbone.rate=0.01, now it is 0.02"):
        start("stages.backbone.rate=0.02")


def test_a_night_watches_rows_that_it_does_not_read_and_leaves_out_those_that_it_would(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(300)))
    catalogue = bench.index().catalogue
    labels = start_labels(catalogue, bench.storage, 10.0).for_new_run("tonight")
    words = SubsetWords(bench.storage, catalogue.id, catalogue.version, 100, catalogue.class_names, (), {})
    rows = catalogue.read(0, 100, ["row", "sample_key", "noisy_class"]).rename_columns(MEMBERS.names)
    write_subset(str(tmp_path / "rows"), words, rows.cast(MEMBERS))
    some = config(bench, f"data.subset={tmp_path}/rows", "evidence.watched=0.5")
    plan = make_plan(some, parent=labels)
    assert 100 < len(plan.roles.watched) < 200
    assert plan.stream.left_out is not None
    assert plan.stream.left_out.rows.tolist() == plan.roles.watched[plan.roles.watched < 100].tolist()
    assert plan.num_samples == 100 - len(plan.stream.left_out.rows)
    assert make_plan(config(bench, f"data.subset={tmp_path}/rows"), parent=labels).num_samples == 100


def test_what_is_not_measured_is_said_before_the_run_starts(bench: Bench) -> None:
    off = make_plan(config(bench))
    what = "how many labels are wrong and what the repair gains"
    assert off.lines[-1] == f"evidence is off: the run does not measure {what}"
    few = make_plan(config(bench, "evidence.watched=null"))
    assert few.lines[-1].endswith(f"; too few to measure {what}")
    assert few.num_samples == 30


def test_several_trainings_are_announced_and_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(600)))
    bench.index()
    once, automatic = (config(bench, "evidence.watched=null", *folds) for folds in (["evidence.folds=1"], []))
    one, four = make_plan(once), make_plan(automatic)
    line = (
        "evidence: 4 trainings, each watching another quarter of the samples (evidence.folds=1 trains once)"
    )
    assert line in four.lines
    assert not any("trainings" in line for line in one.lines)
    assert four.automatic["evidence.folds"] == 4
    assert (count(one)["trainings"], count(four)["trainings"]) == (1, 4)
    assert count(four)["requests"] == 4 * count(one)["requests"]
    for plan in (one, four):
        hours = plan.num_samples * plan.schedule.epochs * plan.roles.trainings / 50 / 3600
        assert estimate(plan, images_per_s=50)["hours"] == pytest.approx(hours)


def test_a_run_keeps_the_roles_that_it_started_with_and_none_of_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ensure_ray", "require_room"):
        monkeypatch.setattr(f"pencil_scale.train.run.{name}", lambda *_: None)
    bench = Bench(tmp_path)
    bench.shard("a.tar", samples(range(300)))
    bench.index()

    def start(*overrides: str) -> Roles:
        with Lease.hold(bench.storage, "runs/t/lease", what="a test") as lease:
            plan, record = _start_or_resume(config(bench, *overrides), None, lease)
        resumed = make_plan(config(bench, *overrides), record=record)
        assert resumed.roles.watched.tolist() == plan.roles.watched.tolist()
        return resumed.roles

    assert len(start("evidence.watched=0.5").watched) > 100
    assert len(start("evidence.watched=0").watched) == 0
