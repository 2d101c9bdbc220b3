"""What a run is checked for before a worker starts: classes by name, and samples that were taken down."""

from pathlib import Path

import pytest
import torch
from catalogue_making import CLASSES, Bench, samples

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.config.settings import Config
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.preflight import check_clean, check_run
from pencil_scale.train.run import _own_weights


class CheckBench(Bench):
    """Six samples to train on and six to evaluate with; their labels are names."""

    def indexed(self, **data: object) -> Config:
        shards = {"shards": f"{self.folder}/a.tar", "label": "json:name"}
        self.index(**{**shards, "test": f"{self.folder}/clean.tar", **data})
        return load_config(self.folder / "config.yaml", ["images.crop=4"])


@pytest.fixture
def bench(tmp_path: Path) -> CheckBench:
    found = CheckBench(tmp_path)
    found.shard("a.tar", samples(range(6)))
    found.shard("clean.tar", samples(range(50, 56)))
    return found


def test_a_run_resumes_only_with_the_class_list_of_its_own_catalogue(bench: CheckBench) -> None:
    bench.indexed()
    (bench.folder / "classes.txt").write_text("cat\nant\nbee\n")
    config = bench.indexed()
    assert check_run(config).class_names == ("cat", "ant", "bee")
    with pytest.raises(PencilError, match=r"same names in another order.*restore the list of .* version 1"):
        check_run(config, version=1)


def test_a_clean_set_of_another_class_list_is_refused(bench: CheckBench) -> None:
    """It was indexed before the list was reordered, and left out of the config since."""
    bench.indexed()
    (bench.folder / "classes.txt").write_text("cat\nant\nbee\n")
    config = bench.indexed(test=None)
    with pytest.raises(
        PencilError, match=r"data.test: the class list of its catalogue, version 1, has the same"
    ):
        check_clean(config, {"test": 1}, check_run(config).class_names)


def test_samples_that_were_taken_down_leave_a_run_that_started_before(bench: CheckBench) -> None:
    exclude = bench.folder / "exclude.txt"
    exclude.write_text("")
    bench.indexed(exclude=str(exclude))
    exclude.write_text("000002\n000051\n")
    config = bench.indexed(exclude=str(exclude))
    checked = check_run(config, version=1)
    assert checked.subset is not None
    assert checked.subset.tolist() == [0, 1, 3, 4, 5]
    assert "1 more samples were taken down" in checked.lines[-1]
    spec = check_clean(config, {"test": 1}, CLASSES)["test"]
    assert spec.subset is not None
    assert spec.subset.tolist() == [0, 2, 3, 4, 5]
    newest = check_run(config)  # a new run has the catalogue that knows it
    assert newest.subset is None
    assert newest.catalogue.num_ok == Catalogue.open(bench.storage).num_ok == 5


def test_a_run_keeps_the_weights_it_starts_from(bench: CheckBench) -> None:
    bench.indexed()
    original = bench.folder / "pretrained.pt"
    weights = build_backbone("small_convnet", 3).state_dict()
    torch.save(weights, original)
    config = load_config(bench.folder / "config.yaml", [f"model.weights={original}"])
    kept = _own_weights(config)
    original.unlink()
    again = build_backbone("small_convnet", 3, kept).state_dict()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    inside = load_config(bench.folder / "config.yaml", [f"model.weights={kept}"])
    assert _own_weights(inside) == kept  # a model of the storage itself, such as a night's parent
