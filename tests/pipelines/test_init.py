"""`pipelines.init` finds label source, classes, ids and sizes, and writes a config that can be trained."""

import json
from pathlib import Path

import pytest
from catalogue_making import image, sample, samples, write_shard
from PIL import Image

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.train.plan import make_plan
from pipelines import init
from pipelines.demo_photos import LITE0_FACTORY


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_is_reachable", lambda url: False)
    return tmp_path


def labelled(number: int, **fields: object) -> list[tuple[str, bytes]]:
    """An image with a JSON member, as img2dataset writes it."""
    return [
        (f"{number:05d}.jpg", image(number, "JPEG")),
        (f"{number:05d}.json", json.dumps({"key": f"{number:05d}", "status": "success", **fields}).encode()),
    ]


def started(*arguments: str) -> Config:
    assert init.main([*arguments]) == 0
    return load_config("config.yaml")


def test_shards_with_cls_and_names_need_nothing_else(here: Path) -> None:
    (here / "shards").mkdir()
    write_shard(here / "shards" / "0.tar", [m for n in range(30) for m in sample(n)])
    config = started("shards")
    assert (config.run.name, config.data.label, config.data.identity) == ("shards", "cls", "key")
    plan = make_plan(config)
    assert (plan.num_samples + len(plan.roles.watched), plan.class_names) == (30, ("0", "1", "2"))
    assert plan.config.images.crop == 4
    assert "automatic: images.pad 1, images.crop 4, model.backbone small_convnet" in plan.lines[2]


def test_numbers_get_the_names_that_stand_in_the_json(here: Path) -> None:
    members = []
    for number in range(30):
        fields = json.dumps({"label": "xyz"[number % 3]}).encode()
        members += [*sample(number)[:2], (f"{number:06d}.json", fields)]
    write_shard(here / "0.tar", members)
    config = started("0.tar", "--storage", "lake")
    assert Path(config.data.classes).read_text().split() == ["x", "y", "z"]


def test_img2dataset_shards_get_their_json_field_and_ids_that_differ(here: Path) -> None:
    for shard in range(2):  # the same keys in both
        some = [m for n in range(20) for m in labelled(n, caption=f"photo {n}", category=f"c{n % 4}")]
        write_shard(here / f"{shard:05d}.tar", some)
        (here / f"{shard:05d}_stats.json").write_text(json.dumps({"successes": 20}))
    config = started(f"{here}/{{00000..00001}}.tar", "--storage", "lake")
    assert (config.data.label, config.data.identity) == ("json:category", "shard_key")
    assert config.data.img2dataset
    assert Catalogue.open("lake").num_ok == 40


def photos(here: Path) -> None:
    for number in range(12):
        folder = here / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300 + number, 200), (number, 0, 0)).save(folder / f"{number}.jpg")


def test_class_folders_become_shards(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(here)
    (here / "photos" / "owl").mkdir()
    config = started("photos")
    assert Path(config.data.classes).read_text().split() == ["cat", "dog"]
    assert Catalogue.open(config.run.storage).num_ok == 12
    printed = capsys.readouterr().out
    assert "1 folder, such as owl" in printed
    assert "next: python -m pencil_scale.train config.yaml" in printed


def test_a_command_that_is_stopped_while_it_indexes_can_be_given_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Config) -> None:
        raise KeyboardInterrupt

    photos(here)
    with monkeypatch.context() as patch:
        patch.setattr(init.index_shards, "run", stop)
        assert init.main(["photos"]) == 143
    assert Catalogue.open(started("photos").run.storage).num_ok == 12


@pytest.mark.parametrize(
    ("online", "installed", "network"),
    [(True, True, "weights: imagenet"), (False, True, f"backbone: {LITE0_FACTORY}"), (False, False, None)],
)
def test_photos_get_pretrained_weights_and_only_the_head_is_trained(
    online: bool, installed: bool, network: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(here)
    monkeypatch.setenv("TORCH_HOME", str(here))
    monkeypatch.setattr(init, "_num_gpus", lambda: 0)
    monkeypatch.setattr(init, "_is_reachable", lambda url: online)
    monkeypatch.setattr(init, "LITE0", ("json",) if installed else ("no_such_package",))
    model = started("photos").model
    text = Path("config.yaml").read_text()
    if network:
        assert network in text
        assert model.head == "linear"
    else:
        assert "# model: {backbone: resnet18, weights: imagenet, head: linear}" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "nowhere: no such folder or shard"),
        ("home", "has one folder per split, not per class"),
        ("home/train", "home/train has one folder, cats; expected a folder per class, at least 2"),
    ],
)
def test_a_wrong_folder_is_refused(
    source: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        photos(here / "home" / split)
        (here / "home" / split / "photos").rename(here / "home" / split / "cats")
    assert init.main([source]) == 2
    assert words in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_an_existing_config_is_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text("mine")
    write_shard(here / "0.tar", samples(range(6)))
    assert init.main(["0.tar"]) == 2
    assert "config.yaml exists" in capsys.readouterr().err
    assert Path("config.yaml").read_text() == "mine"


def test_samples_without_a_label_are_refused_with_the_fields_found(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard(here / "0.tar", [m for n in range(9) for m in labelled(n, caption=f"photo {n}")])
    assert init.main(["0.tar"]) == 2
    assert "json:caption (9 values, such as 'photo 0')" in capsys.readouterr().err
