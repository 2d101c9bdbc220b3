"""Training refuses a config that describes other data than what was indexed."""

from pathlib import Path

import pytest
from catalogue_making import Bench, samples

from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.preflight import require_agreement


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
    assert "run pipelines.index_shards again" in str(refused.value)


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
        assert bench.index(shards=f"{bench.folder}/[01].tar").catalogue.num_ok == 30


def test_a_list_to_exclude_that_was_indexed_is_agreed_on_until_it_changes(bench: Bench) -> None:
    gone = bench.folder / "gone.txt"
    bench.index(exclude=str(gone))
    require_agreement(config(bench))
    gone.write_text("000003\n000004\n")
    with pytest.raises(PencilError, match="not the list the catalogue was indexed with"):
        require_agreement(config(bench))
    with pytest.raises(PencilError, match="no such file"):
        require_agreement(config(bench, f"data.exclude={bench.folder}/nowhere.txt"))
