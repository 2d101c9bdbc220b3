"""A YAML file and overrides become a frozen config, or one clear line per problem."""

import contextlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pencil_scale.config.command import run_job
from pencil_scale.config.keys import KEYS, help_page
from pencil_scale.config.loader import describe, load_config, masked
from pencil_scale.config.settings import Config
from pencil_scale.config.values import Line, Steps
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.retries import RefusedError

GOOD = """\
run: {name: small, storage: runs/small}
data:
  shards: shards/train-{000..009}.tar
  classes: classes.txt
model: {backbone: resnet18}
optimizer: {tuned_batch: 32, batch_per_worker: 64}
stages:
  backbone: {epochs: 1, rate: 1e-2}
  pencil:
    epochs: 2
    rate: 0.01
    lambda: 400
    tuned_classes: 10
  finetune: {epochs: 1, rate: 0.01}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path, GOOD)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_small_file_is_completed_with_defaults(good: Path) -> None:
    config = load_config(good)
    assert config.data.shards == ("shards/train-{000..009}.tar",)
    assert config.stages.backbone.rate == 0.01  # 1e-2 is a number in YAML 1.2, and text in YAML 1.1
    assert config.stages.pencil.compatibility == "released"
    assert config.workers.count == (1, 1)


def test_a_later_override_wins(good: Path) -> None:
    config = load_config(good, ["stages.pencil.epochs=7", "stages.pencil.epochs=9"])
    assert config.stages.pencil.epochs == 9


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("data.shards=@list.txt", ("@list.txt",)),
        ("data.shards=*.tar", ("*.tar",)),
        ("data.shards=[a.tar, b.tar]", ("a.tar", "b.tar")),
        ("data.shards='010'", ("010",)),
        ("data.shards=s3://a/b={0..9}.tar", ("s3://a/b={0..9}.tar",)),
    ],
)
def test_plain_words_need_no_quotes(good: Path, override: str, found: tuple[str, ...]) -> None:
    assert load_config(good, [override]).data.shards == found


@pytest.mark.parametrize(
    ("spelled", "curve", "values"),
    [
        ("400", Steps(((0, 400.0),)), [400, 400, 400]),
        ("[[0, 3000], [2, 500]]", Steps(((0, 3000.0), (2, 500.0))), [3000, 3000, 500]),
        ("{start: 3000, end: 0}", Line(3000.0, 0.0), [3000, 1500, 0]),
    ],
)
def test_lambda_is_a_number_a_line_or_steps(
    good: Path, spelled: str, curve: object, values: list[float]
) -> None:
    found = load_config(good, [f"stages.pencil.lambda={spelled}"]).stages.pencil.lambda_
    assert found == curve
    assert [found.at(epoch, num_epochs=3) for epoch in range(3)] == values


@pytest.mark.parametrize(("decode", "share"), [("cpu", 0.0), ("0.3", 0.3), ("gpu", 1.0)])
def test_images_are_decoded_on_cpus_the_gpu_or_both(good: Path, decode: str, share: float) -> None:
    config = load_config(good, [f"images.decode={decode}", "images.resize=256", "images.crop=224"])
    assert config.images.gpu_share == share
    assert describe(config)["images.decode"] == decode


def test_a_config_cannot_be_changed(good: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_config(good).run.seed = 2  # type: ignore[misc]


BROKEN = {
    "an unknown key": ("stages:\n  pencil: {epoch: 2}\n", r"run.yaml:2: unknown key 'stages.pencil.epoch'.*'stages.pencil.epochs'"),
    "an unknown section": ("stage: {}\n", r"run.yaml:1: unknown key 'stage'.*'stages'"),
    "a key in the wrong place": ("epochs: 3\n", r"unknown key 'epochs'.*'stages.backbone.epochs'"),
    "a word for a number": (GOOD.replace("epochs: 2", "epochs: two"), r"run.yaml:10: stages.pencil.epochs: found 'two'; expected: whole number from 0, in epochs"),
    "a boolean for a number": (GOOD.replace("epochs: 2", "epochs: true"), r"found True; expected: whole number"),
    "half an epoch": (GOOD.replace("epochs: 2", "epochs: 1.5"), r"found 1.5; expected: whole number"),
    "a number for a word": (GOOD.replace("small,", "7,"), r"run.yaml:1: run.name: found 7; expected: name"),
    "a negative length": (GOOD.replace("epochs: 2", "epochs: -1"), r"found -1; expected: whole number from 0"),
    "a rate of 0": (GOOD.replace("rate: 1e-2", "rate: 0"), r"run.yaml:8: stages.backbone.rate: found 0; expected: number above 0"),
    "an infinite rate": (GOOD.replace("rate: 1e-2", "rate: .inf"), r"found inf; .* a finite number"),
    "a missing key": (GOOD.replace("storage: runs/small", "seed: 1"), r"run.yaml:1: 'run.storage' is missing: local folder"),
    "a missing section": (GOOD.replace("run: {name: small, storage: runs/small}\n", ""), r"'run' is missing: the run"),
    "an empty file": ("", r"'run' is missing"),
    "a list": ("- a\n- b\n", r"run.yaml: contains \['a', 'b'\]; sections such as"),
    "a lone word": ("hello\n", r"run.yaml: contains 'hello'"),
    "an empty section": (GOOD.replace("{backbone: resnet18}", ""), r"model: found None; expected: section with keys"),
    "broken YAML": ("run: {name: x\n", r"run.yaml:2: broken YAML: "),
    "a tab": ("run:\n\tname: x\n", r"run.yaml:2: broken YAML: found character"),
    "a key given twice": (GOOD + "run: {}\n", r"run.yaml:15: duplicate key 'run'"),
    "bytes that are not text": (b"run: \xff\n", r"run.yaml: byte 5 is not UTF-8"),
    "a control character": ("run: \x00\n", r"run.yaml.*broken YAML"),
    "a Python object": ("run: !!python/object/apply:os.getcwd []\n", r"run: found \[\]; expected: section"),
    "an unknown tag": ("run: !secret x\n", r"run.yaml:1: broken YAML: could not determine a constructor"),
    "a list as key": ("? [a]\n: b\n", r"run.yaml:1: a key is a list"),
    "two documents": (GOOD + "---\n" + GOOD, r"broken YAML"),
    "a loop": ("run: &a {b: *a}\n", r"nested more than 20 levels deep"),
    "steps that do not start": (GOOD.replace("lambda: 400", "lambda: [[1, 400]]"), r"run.yaml:12: stages.pencil.lambda: found \[\[1, 400\]\]; the epochs of its steps must rise from 0"),
    "an unknown curve": (GOOD.replace("lambda: 400", "lambda: {from: 1}"), r"stages.pencil.lambda: .*line {start: 3000, end: 0}"),
    "a negative lambda": (GOOD.replace("lambda: 400", "lambda: -4"), r"found -4; expected: number from 0"),
    "an unknown label source": (GOOD.replace("classes: classes.txt", "{classes: c, label: clz}").replace("data:\n  shards: shards/train-{000..009}.tar\n  ", "data: "), r"data.label: found 'clz'; expected: cls \| txt"),
    "a variable that is not set": (GOOD.replace("resnet18", '"${NOT_SET_ANYWHERE}"'), r"run.yaml:5: model.backbone: the environment variable NOT_SET_ANYWHERE is not set"),
    "a crop larger than the image": (GOOD + "images: {resize: 100, crop: 224}\n", r"run.yaml:15: images: crop 224 is larger than resize 100"),
    "decoding more than all": (GOOD + "images: {decode: 1.5}\n", r"run.yaml:15: images.decode: found 1.5; expected: cpu \| gpu \| number above 0 below 1$"),
    "a share of images without a size": (GOOD + "images: {decode: 0.3, crop: 224}\n", r"decode: 0.3 needs resize, the side to which"),
    "too few numbers": (GOOD + "images: {mean: [0, 1]}\n", r"run.yaml:15: images.mean: found \[0, 1\]; expected: three numbers \[red, green, blue\]$"),
    "too many numbers": (GOOD + "images: {mean: [0, 1, 2, 3]}\n", r"images.mean: found \[0, 1, 2, 3\]; expected: three numbers \[red, green, blue\]$"),
    "two stages of three": (GOOD + "nightly: {first_epochs: [1, 2]}\n", r"found \[1, 2\]; expected: three whole numbers \[backbone, pencil, finetune\]"),
    "one number for three": (GOOD + "images: {std: 3}\n", r"images.std: found 3; expected: three numbers \[red, green, blue\] above 0"),
    "a deviation of 0": (GOOD + "images: {std: [0, 1, 1]}\n", r"images.std: found \[0, 1, 1\]; expected: .* above 0"),
    "a very long number": (GOOD.replace("epochs: 2", "epochs: " + "9" * 5000), r"run.yaml:10: stages.pencil.epochs: found '999.*expected: whole number"),
    "very many brackets": ("[" * 3000, r"run.yaml.*broken YAML"),
    "a bomb of aliases": ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 10)}]\n" for p, c in zip("abcde", "bcdef", strict=True)), r"more than 10,000 values"),
    "an unclosed variable": (GOOD.replace("runs/small", '"${HOME"'), r"run.storage: found '\$\{HOME'; a variable is written \$\{NAME\}"),
    "a run name that is a path": (GOOD.replace("small,", "../x,"), r"run.name: found '../x'; expected: name of letters"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_explained_line_by_line(case: str, tmp_path: Path) -> None:
    text, says = BROKEN[case]
    with pytest.raises(PencilError, match=says):
        load_config(written(tmp_path, text))


def test_an_error_of_a_job_shows_the_variable_instead_of_its_value(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_PATH", "/hush-hush/classes.txt")
    config = load_config(good, ["data.classes=${SECRET_PATH}"])
    said = masked("data.classes: /hush-hush/classes.txt cannot be read", config)
    assert said == "data.classes: ${SECRET_PATH} cannot be read"
    config = load_config(good, ["data.shards=['${SECRET_PATH}', b]"])
    assert masked("/hush-hush/classes.txt and b", config) == "${...} and b"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tracking.uri:http://me:hush@host", r"override 'tracking.uri:http://me:\*\*\*@host': KEY=VALUE"),
        ("stages.pencil.epochs=" + "9" * 5000, r"expected: whole number"),
        ("stages.pencil.epochs", r"override 'stages.pencil.epochs': KEY=VALUE was expected"),
        ("=3", r"KEY=VALUE was expected"),
        (
            "stages.pencl.epochs=3",
            r"override 'stages.pencl.epochs': unknown key 'stages.pencl'.*'stages.pencil'",
        ),
        ("run.name.first=a", r"'run.name' is a value, not a section"),
        ("stages.pencil.epochs=two", r"override 'stages.pencil.epochs': found 'two'"),
        ("data.shards=[a", r"override 'data.shards': broken YAML"),
        ("data.shards=[a, 3]", r"expected: URL or list of URLs"),
        ("workers.count=0", r"found 0; expected: whole number from 1"),
    ],
)
def test_a_broken_override_is_explained_in_one_line(good: Path, override: str, says: str) -> None:
    with pytest.raises(PencilError, match=says):
        load_config(good, [override])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "stages.finetune.schedule=cosine stages.finetune.drop_after=[3]",
            "drop_after: not with schedule: cosine",
        ),
        ("stages.pencil.rounds=2 stages.pencil.epochs=0", "rounds: more than 1 needs epochs above 0"),
    ],
)
def test_options_of_the_stages_that_contradict_each_other_are_refused(
    good: Path, overrides: str, says: str
) -> None:
    with pytest.raises(PencilError, match=says):
        load_config(good, overrides.split())


def test_a_key_given_twice_on_the_command_line_is_refused(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = ["data.shards=train-0.tar", "data.shards=train-1.tar"]  # what a shell makes of train-{0..1}.tar
    assert run_job(lambda config: None, [str(good), *shards], module="x", what="") == 2
    assert "override 'data.shards' is given 2 times; give it once, and quote" in capsys.readouterr().err


def test_a_config_needs_only_a_run_and_data(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, GOOD.partition("model:")[0]))
    assert config.stages.backbone.epochs is None  # until it is filled in
    assert "stages.backbone.epochs: whole number from 0, in epochs, default automatic" in help_page()
    with pytest.raises(
        PencilError, match=r"stages.backbone.epochs': found -1; expected: whole number from 0"
    ):
        load_config(written(tmp_path, GOOD), ["stages.backbone.epochs=-1"])


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("epochs: 2", "epochs: two").replace("backbone: resnet18", "bakbone: resnet18")
    with pytest.raises(PencilError) as caught:
        load_config(written(tmp_path, text))
    # The word, and the misspelt key, which is not also reported as missing.
    assert len(str(caught.value).splitlines()) == 2


def test_an_unknown_key_hides_a_missing_one_only_if_they_are_similar(tmp_path: Path) -> None:
    text = GOOD.replace("classes: classes.txt", "zzzz: classes.txt")
    with pytest.raises(PencilError, match=r"'data\.classes' is missing"):
        load_config(written(tmp_path, text))


def test_a_missing_file_and_a_folder_have_different_messages(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"absent.yaml: cannot be read as a config file: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(PencilError, match="cannot be read as a config file: Is a directory"):
        load_config(tmp_path)


def test_the_key_decides_how_a_variable_is_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONIGHT", "20261115")
    config = load_config(
        good, ["run.name=${TONIGHT}", "run.seed=${TONIGHT}", "data.shards=['a-${TONIGHT}.tar']"]
    )
    assert (config.run.name, config.run.seed) == ("20261115", 20261115)
    assert config.data.shards == ("a-20261115.tar",)


def test_the_value_of_a_variable_is_never_shown(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER", "http://me:hush-hush@mlflow")
    config = load_config(good, ["tracking.uri=${SERVER}"])
    assert config.tracking.uri == "http://me:hush-hush@mlflow"
    travelled = pickle.loads(pickle.dumps(config))  # as on its way to the workers
    for shown in (repr(travelled), str(travelled.tracking), str(describe(travelled))):
        assert "hush" not in shown
        assert "${SERVER}" in shown


def test_an_error_about_a_variable_shows_the_variable(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush-hush")
    with pytest.raises(PencilError, match=r"found '\$\{SECRET\}'") as caught:
        load_config(good, ["run.seed=${SECRET}"])
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_password_in_a_url_is_masked(good: Path) -> None:
    config = load_config(
        good, ["run.storage=s3://id:hush@b", "tracking.uri=http://h/?X-Amz-Signature=hush&a=1"]
    )
    assert "hush" not in repr(config) + str(describe(config))
    assert "a=1" in describe(config)["tracking.uri"]


def test_the_help_page_lists_every_key(good: Path) -> None:
    page = help_page()
    for dotted, field in KEYS.items():
        assert f"{dotted}: " in page
        assert field.description
    assert "data.window_mb: whole number from 1, in MB, default 64" in page
    assert set(describe(load_config(good))) <= set(KEYS)


def test_settings_are_described_in_yaml_that_gives_the_same_config(good: Path) -> None:
    lists = ["data.shards=[a*.tar, '@list']", "workers.count=[1, 4]", "nightly.remap={a: null, 'b: c': d}"]
    config = load_config(
        good, [*lists, "stages.pencil.lambda=[[0, 3000], [5, 500]]", "tracking.uri=http://a"]
    )
    described = describe(config)
    assert described["workers.count"] == "[1, 4]"
    assert (described["workers.gpu"], described["data.truth"]) == ("false", "null")
    assert load_config(good, [f"{key}={value}" for key, value in described.items()]) == config


@pytest.mark.slow
@given(st.text())
def test_any_override_gives_a_config_or_a_config_error(text: str) -> None:
    path = Path(__file__).parents[2] / "configs" / "demo.yaml"
    with contextlib.suppress(PencilError):
        assert isinstance(load_config(path, [text]), Config)
    with contextlib.suppress(PencilError):
        assert load_config(path, [f"tracking.experiment={text}"]).tracking.experiment in (
            text,
            text[1:-1],
            None,
        )


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=str)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_config(path).run.name == path.stem


def test_the_command_explains_itself_and_its_errors(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "pencil_scale.train"]
    helped = subprocess.run([*train, "--help"], capture_output=True, text=True, check=True)
    assert "stages.pencil.lambda" in helped.stdout
    failed = subprocess.run([*train, tmp_path / "absent.yaml"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1


def test_a_store_that_refuses_access_is_reported_with_the_keys_that_name_it(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> None:
        raise RefusedError("s3://lake/run/catalogue/manifest.json: no access (403); check the credentials")

    words = [str(good), "run.storage=s3://lake/run", "data.shards=s3://crawl/{0..9}.tar"]
    assert run_job(run, words, module="x", what="") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: s3://lake/run/catalogue/manifest.json: no access (403); check the credentials (see run.storage)"
    )
