"""What a worker prepares: batches decoded ahead and in order, and scratch folders that do not outlive it."""

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pencil_scale.config.loader import load_config
from pencil_scale.images.decode import decode
from pencil_scale.labels.owners import Batch
from pencil_scale.method.schedule import Stage
from pencil_scale.train.preparation import DECODED_AHEAD, Preparation, claim_scratch, sweep_scratch

SIDE = 16


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def encoded(first_row: int, images: list[bytes]) -> Batch:
    rows = torch.arange(first_row, first_row + len(images))
    none = torch.empty(0, 3, SIDE, SIDE, dtype=torch.uint8)
    weight = torch.ones(len(images))
    return Batch(rows=rows, images=none, weight=weight, noisy_class=rows * 0, encoded=dict(enumerate(images)))


def stock(num: int) -> Iterator[Batch]:
    for first_row in range(0, 4 * num, 4):
        yield encoded(first_row, [png(first_row + n) for n in range(3)] + [b"no image"])


@pytest.fixture
def preparation() -> Preparation:
    overrides = [f"images.resize={SIDE}", "images.decode=gpu", f"images.crop={SIDE}"]
    config = load_config("configs/cifar10.yaml", overrides)
    return Preparation(config, torch.device("cpu"), lambda row, reason: f"row {row}: {reason}")


def test_batches_decoded_ahead_come_in_their_order_with_their_problems(preparation: Preparation) -> None:
    found = list(preparation.ahead(stock(6)))
    assert [int(batch.rows[0]) for batch in found] == [0, 4, 8, 12, 16, 20]
    for batch in found:
        first_row = int(batch.rows[0])
        assert batch.weight.tolist() == [1.0, 1.0, 1.0, 0.0]
        assert [problem.split(":")[0] for problem in batch.problems] == [f"row {first_row + 3}"]
        expected = np.stack([decode(png(first_row + n)) for n in range(3)])
        assert np.array_equal(batch.images[:3].permute(0, 2, 3, 1).numpy(), expected)
        assert preparation.prepare(batch, 0, Stage("backbone", 0.1)).problems == batch.problems


def test_problems_of_both_decoders_are_named_and_have_weight_0(preparation: Preparation) -> None:
    """The readers decoded rows 1 and 4, and could not read row 4; of the others row 3 is no image."""
    pixels = np.stack([decode(png(1)), np.zeros((SIDE, SIDE, 3), np.uint8)])
    mixed = Batch(
        rows=torch.arange(5),
        images=torch.from_numpy(pixels).permute(0, 3, 1, 2),
        weight=torch.tensor([1.0, 1, 1, 1, 0]),
        problems=("row 4: damaged",),
        encoded={0: png(0), 2: png(2), 3: b"no image"},
    )
    (found,) = preparation.ahead(iter([mixed]))
    assert found.weight.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [problem.split(":")[0] for problem in found.problems] == ["row 4", "row 3"]
    assert np.array_equal(found.images[:3].permute(0, 2, 3, 1), np.stack([decode(png(n)) for n in range(3)]))
    assert not found.images[3:].any()
    assert not found.encoded


def test_an_epoch_left_early_leaves_no_thread_reading(preparation: Preparation) -> None:
    taken: list[int] = []

    def noted() -> Iterator[Batch]:
        for batch in stock(100):
            taken.append(int(batch.rows[0]))
            yield batch

    before = threading.active_count()
    coming = preparation.ahead(noted())
    next(coming)
    coming.close()
    assert threading.active_count() == before
    assert len(taken) <= DECODED_AHEAD + 2


def test_an_error_of_the_stream_is_raised_where_batches_are_taken(preparation: Preparation) -> None:
    def broken() -> Iterator[Batch]:
        yield from stock(2)
        raise OSError("the shard is gone")

    coming = preparation.ahead(broken())
    assert len([next(coming), next(coming)]) == 2
    with pytest.raises(OSError, match="the shard is gone"):
        next(coming)


ROOT = Path(__file__).parents[2]


def start(code: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    """Run some code in another process, which prints a line and then waits."""
    words = [sys.executable, "-c", f"import sys\n{code}\nprint('claimed', flush=True)\nsys.stdin.read()"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*words, *map(str, arguments)], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def test_a_folder_is_left_alone_while_its_process_lives_and_removed_when_it_was_killed(
    tmp_path: Path,
) -> None:
    claimed = "from pencil_scale.train.preparation import claim_scratch\nclaim_scratch(sys.argv[1], 'labels')"
    process = start(claimed, tmp_path)
    (theirs,) = tmp_path.iterdir()
    (theirs / "labels.arrow").write_text("much")
    ours = claim_scratch(str(tmp_path), "checkpoint")
    assert set(tmp_path.iterdir()) == {theirs, ours}
    process.kill()
    process.wait()
    another = claim_scratch(str(tmp_path), "checkpoint")
    assert set(tmp_path.iterdir()) == {ours, another}


def test_folders_that_are_not_scratch_are_never_swept(tmp_path: Path) -> None:
    for name in ("pencil_scale-other-12", "pencil_scale-ab34", "photos"):
        (tmp_path / name).mkdir()
    sweep_scratch(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_scratch_folder_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    assert claim_scratch(str(tmp_path / "fast" / "disk"), "labels").is_dir()


@pytest.fixture
def whole() -> tuple[Preparation, Batch]:
    """Eight images, the third of which could not be read."""
    config = load_config("configs/cifar10.yaml", ["images.crop=8", "images.pad=0", "images.flip=false"])
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (8, 3, 8, 8), np.uint8))
    weight = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])
    preparation = Preparation(config, torch.device("cpu"), lambda row, reason: f"row {row}: {reason}")
    return preparation, Batch(rows=torch.arange(8), images=images, weight=weight)


def test_each_image_is_mixed_with_the_one_before_it_unless_that_could_not_be_read(
    whole: tuple[Preparation, Batch],
) -> None:
    preparation, batch = whole
    plain = preparation.prepare(batch, 3, Stage("finetune", 0.1))
    mixed = preparation.prepare(batch, 3, Stage("finetune", 0.1, mixup=1.0))
    assert plain.own is None
    assert mixed.own is not None
    share = mixed.own[0].item()
    assert 0.5 <= share < 1
    assert mixed.own[:, 0].tolist() == [share] * 3 + [1.0] + [share] * 4
    expected = mixed.own[..., None, None] * plain.images
    expected += (1 - mixed.own[..., None, None]) * plain.images.roll(1, 0)
    torch.testing.assert_close(mixed.images, expected)
    assert mixed.weight.tolist() == batch.weight.tolist()  # no sample is lost by being mixed
    again, later = (preparation.prepare(batch, epoch, Stage("finetune", 0.1, mixup=1.0)) for epoch in (3, 4))
    assert torch.equal(again.images, mixed.images)
    assert not torch.equal(later.images, mixed.images)


@pytest.mark.parametrize("changed", [{"strong": True}, {"mixup": 1.0}, {"strong": True, "mixup": 1.0}])
def test_a_teacher_sees_images_as_they_are_neither_strongly_augmented_nor_mixed(
    whole: tuple[Preparation, Batch], changed: dict[str, Any]
) -> None:
    preparation, batch = whole
    taught = Stage("pencil", 0.1, label_rate=1.0, decay=0.9, **changed)
    weak = preparation.prepare(batch, 0, Stage("pencil", 0.1, label_rate=1.0)).images
    found = preparation.prepare(batch, 0, taught)
    assert torch.equal(found.weak_images, weak)
    assert not torch.equal(found.images, weak)
    assert preparation.prepare(batch, 0, Stage("backbone", 0.1, **changed)).weak_images is None
    # Also where labels are fixed: its predictions of these views decide which labels are published.
    fixed = preparation.prepare(batch, 0, Stage("finetune", 0.1, decay=0.9, **changed)).weak_images
    assert torch.equal(fixed, weak)
