from dataclasses import replace
from pathlib import Path

import pytest
import torch
from label_making import names

from pencil_scale.labels.table import LabelTable
from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError
from pencil_scale.train.checkpoints import Origin, Progress, Saved, read_checkpoint, write_checkpoint

ORIGIN = Origin("a1b2", 2, "f00d", 3, ("ant", "bee"), {"test": 5})


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    model = build_backbone("small_convnet", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    labels = LabelTable.create(tmp_path / "table", [0, 1, 2], names(10)).snapshot(tmp_path / "store")
    record = [{"epoch": 0, "stage": "backbone", "loss": 2.3}]
    return Saved(ORIGIN, model.state_dict(), optimizer.state_dict(), Progress(1, 0, 7), labels, record)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, saved: Saved) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", saved)
    found = read_checkpoint(tmp_path / "checkpoint")
    assert (found.progress, found.labels, found.record) == (saved.progress, saved.labels, saved.record)
    assert found.origin == ORIGIN
    for name, tensor in saved.weights.items():
        assert torch.equal(found.weights[name], tensor)
    momentum = saved.optimizer["state"][0]["momentum_buffer"]
    assert torch.equal(found.optimizer["state"][0]["momentum_buffer"], momentum)


@pytest.mark.parametrize("name", ["weights.pt", "optimizer.pt", "labels.json", "state.json"])
def test_a_checkpoint_that_lacks_or_garbles_a_file_is_refused(
    tmp_path: Path, saved: Saved, name: str
) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", saved)
    path = tmp_path / "checkpoint" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(PencilError, match="checkpoint") as caught:
        read_checkpoint(tmp_path / "checkpoint")
    path.unlink()
    with pytest.raises(PencilError, match="not a complete checkpoint"):
        read_checkpoint(tmp_path / "checkpoint")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": "c3d4"}, "run is c3d4, expected a1b2"),
        ({"settings": "beef"}, "settings is beef, expected f00d"),
        ({"catalogue_version": 4}, "catalogue_version is 4, expected 3"),
        ({"class_names": ("bee", "ant")}, "same names in another order: class 0 is 'bee', not 'ant'"),
        ({"clean": {"test": 6}}, r"clean is \{'test': 6\}, expected \{'test': 5\}"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(PencilError, match=said):
        replace(ORIGIN, **change).require(ORIGIN, "checkpoint")  # type: ignore[arg-type]


def test_a_checkpoint_of_an_earlier_attempt_at_the_same_run_is_used() -> None:
    replace(ORIGIN, attempt=1).require(ORIGIN, "checkpoint")
