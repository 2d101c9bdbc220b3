"""Owners in real processes, over gloo, each with a working copy of only the parts it owns."""

import json
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from label_making import names, new_labels, predicted

from pencil_scale.labels.exchange import OwnersError
from pencil_scale.labels.manifest import Manifest, merge, visited
from pencil_scale.labels.owners import AHEAD, Batch, Owners, owned_parts
from pencil_scale.labels.start_labels import set_roles
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.evidence import TOP
from pencil_scale.method.pencil import move_labels
from pencil_scale.storage.errors import PencilError

NUM_ROWS, NUM_CLASSES = 6000, TOP + 1  # six parts: fewer than the largest world
TIMEOUT_S = 60.0

# Importing torch takes seconds; every rank is forked from one server that has done it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pencil_scale.labels.owners", "pencil_scale.method.pencil", "pytest"])

Rank = Callable[[Owners, Path], Any]


def run_rank(rank: int, world: int, folder: Path, target: Rank, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    manifest = Manifest.load(folder / "start.json")
    parts = owned_parts(manifest.layout.num_parts, rank, world)
    table = LabelTable.restore(manifest, folder / f"rank-{rank}", parts)
    dist.barrier()  # the time limit of the owners runs from here, however long a busy machine took to start
    try:
        said = target(Owners(table, rank, world, timeout_s=timeout_s), folder)
        (folder / f"manifest-{rank}.json").write_bytes(table.snapshot().encode())
    except Exception as error:
        said = {"error": str(error), "kind": type(error).__name__, "trace": traceback.format_exc()}
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # a rank whose peers are gone must not wait for them on its way out


def start_world(world: int, folder: Path, target: Rank, timeout_s: float = TIMEOUT_S) -> list[BaseProcess]:
    if not (folder / "start.json").exists():
        given = np.arange(NUM_ROWS) % NUM_CLASSES
        new_labels(folder / "store", given, names(NUM_CLASSES)).save(folder / "start.json")
    ranks = [
        CONTEXT.Process(target=run_rank, args=(rank, world, folder, target, timeout_s), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_world(world: int, folder: Path, target: Rank, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """The results of all ranks; for a rank that raised an error, its message."""
    for process in start_world(world, folder, target, timeout_s):
        process.join(120)
        assert process.exitcode == 0
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(world)]


def merged(world: int, folder: Path) -> Manifest:
    paths = [folder / f"manifest-{rank}.json" for rank in range(world)]
    return merge([Manifest.decode(path.read_bytes(), str(path)) for path in paths])


def guess(rows: torch.Tensor) -> torch.Tensor:
    """What a network would predict, as a function of the row alone."""
    return torch.from_numpy(predicted(rows.numpy(), NUM_CLASSES))


def batches_of(rows: torch.Tensor, sizes: list[int]) -> Iterator[Batch]:
    for piece in rows.split(sizes):
        yield Batch(rows=piece, images=None, weight=torch.ones(len(piece)))


def even_sizes(num_rows: int, size: int) -> list[int]:
    return [min(size, num_rows - start) for start in range(0, num_rows, size)]


def uneven_sizes(num_rows: int, rank: int) -> list[int]:
    """Two hundred batches: empty, small and large ones, in a different order on each rank."""
    rng, sizes = np.random.default_rng(rank), list[int]()
    while len(sizes) < 200:
        sizes.append(min(int(rng.choice([0, 1, 30, 64, 300])), num_rows - sum(sizes)))
    return sizes


def share_of(rank: int, world: int) -> torch.Tensor:
    return torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))[rank::world]


def fixed_class_logits(rows: torch.Tensor) -> torch.Tensor:
    """What a network would say, as a function of the row alone."""
    return torch.sin(rows[:, None] * 1.7 + torch.arange(NUM_CLASSES) * 2.9) * 6


def train(owners: Owners, batches: Iterator[Batch], epoch: int) -> int:
    num_batches = 0
    for batch in owners.with_labels(batches, epoch):
        class_logits = fixed_class_logits(batch.rows)
        moved = move_labels(class_logits, batch.label_logits, batch.noisy_class, label_rate=0.9, pull=1.0)
        owners.move(batch.rows, moved, guess(batch.rows), epoch)
        num_batches += 1
    owners.drain()
    return num_batches


def expected_logits(epochs: int) -> np.ndarray:
    rows = torch.arange(NUM_ROWS)
    logits = torch.nn.functional.one_hot(rows % NUM_CLASSES, NUM_CLASSES) * 10.0
    for _ in range(epochs):
        logits = move_labels(fixed_class_logits(rows), logits, rows % NUM_CLASSES, label_rate=0.9, pull=1.0)
    return logits.numpy()


def two_even_epochs(owners: Owners, folder: Path) -> int:
    rows = share_of(owners.rank, owners.world)
    for epoch in range(2):
        train(owners, batches_of(rows, even_sizes(len(rows), 100)), epoch)
    return owners.table.count_visited(1)


def two_uneven_epochs(owners: Owners, folder: Path) -> int:
    # The last rank has only empty batches; the first reads its share too.
    rows = share_of(owners.rank, owners.world)
    if owners.rank == owners.world - 1:
        rows = rows[:0]
    elif owners.rank == 0:
        rows = torch.cat([rows, share_of(owners.world - 1, owners.world)])
    for epoch in range(2):
        train(owners, batches_of(rows, uneven_sizes(len(rows), owners.rank)), epoch)
    return owners.table.count_visited(1)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.slow
def test_the_labels_are_the_same_for_any_world(tmp_path: Path, world: int) -> None:
    assert sum(run_world(world, tmp_path, two_even_epochs)) == NUM_ROWS
    table = LabelTable.restore(merged(world, tmp_path), tmp_path / "after")
    np.testing.assert_allclose(table.read(np.arange(NUM_ROWS)), expected_logits(2), atol=1e-6, rtol=0)
    assert set(table.read(np.arange(NUM_ROWS), "last_epoch").tolist()) == {table.manifest.first_epoch + 1}
    assert_predicted(table, np.arange(NUM_ROWS))


def assert_predicted(table: LabelTable, rows: np.ndarray) -> None:
    """Each of these rows has its own prediction, no matter which rank made it."""
    expected = guess(torch.from_numpy(rows)).numpy()
    assert np.array_equal(table.read(rows, "predicted_class"), expected[:, :TOP])
    assert np.array_equal(table.read(rows, "predicted_log_p"), expected[:, TOP:].astype(np.float16))


def a_stage_of_marks(owners: Owners, folder: Path) -> int:
    """Mark a share of the rows while labels are fetched; then predict the watched rows, twice."""
    rows = share_of(owners.rank, owners.world)
    trained = rows[rows % 10 != 0]
    for batch in owners.with_labels(batches_of(trained, uneven_sizes(len(trained), owners.rank)), 0):
        assert torch.equal(batch.noisy_class, batch.rows % NUM_CLASSES)
        owners.mark(batch.rows, guess(batch.rows), epoch=0)
    owners.drain()
    watched = rows[rows % 10 == 0]
    for predictions in (torch.zeros(len(watched), 2 * TOP), guess(watched)):
        owners.mark(watched, predictions, epoch=0)
        owners.drain()
    return owners.table.count_visited(0)


@pytest.mark.slow
def test_predictions_of_trained_and_watched_rows_reach_their_owners(tmp_path: Path) -> None:
    labels = new_labels(tmp_path / "store", np.arange(NUM_ROWS) % NUM_CLASSES, names(NUM_CLASSES))
    watched = np.arange(0, NUM_ROWS, 10)
    set_roles(labels, None, watched).save(tmp_path / "start.json")
    assert sum(run_world(2, tmp_path, a_stage_of_marks)) == NUM_ROWS - len(watched)
    table = LabelTable.restore(merged(2, tmp_path), tmp_path / "after")
    assert_predicted(table, np.arange(NUM_ROWS))
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), expected_logits(0))
    assert not table.read(watched, "last_epoch").any()


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.slow
def test_empty_and_uneven_batches_lose_no_row(tmp_path: Path, world: int) -> None:
    assert sum(run_world(world, tmp_path, two_uneven_epochs)) == NUM_ROWS
    table = LabelTable.restore(merged(world, tmp_path), tmp_path / "after")
    np.testing.assert_allclose(table.read(np.arange(NUM_ROWS)), expected_logits(2), atol=1e-6, rtol=0)


def others_are_slower(owners: Owners, folder: Path) -> bool:
    """Rank 0 is done first, and waits for the others in the default group, as DDP would."""
    rows = share_of(owners.rank, owners.world)
    for batch in owners.with_labels(batches_of(rows, even_sizes(len(rows), 200))):
        time.sleep(0.02 * owners.rank)
        owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows), epoch=0)
    dist.barrier()
    owners.drain()
    return True


@pytest.mark.slow
def test_a_rank_that_is_done_serves_the_others_while_its_training_thread_waits_for_them(
    tmp_path: Path,
) -> None:
    assert run_world(3, tmp_path, others_are_slower) == [True] * 3
    assert visited(merged(3, tmp_path), 0).all()


def steps_in_lockstep(owners: Owners, folder: Path) -> bool:
    """Every step ends in a collective of the training threads, and batches differ in size by rank."""
    sizes = [70, 140, 280, 560, 10, 10, 10] if owners.rank == 0 else [10] * 7
    rows = share_of(owners.rank, owners.world)[: sum(sizes)]
    for batch in owners.with_labels(batches_of(rows, sizes)):
        dist.all_reduce(torch.ones(1))
        owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows), epoch=0)
    owners.drain()
    return True


@pytest.mark.slow
def test_a_large_batch_does_not_wait_for_the_next_step_of_the_other_ranks(tmp_path: Path) -> None:
    assert run_world(2, tmp_path, steps_in_lockstep) == [True] * 2
    assert visited(merged(2, tmp_path), 0).sum() == 1150


def old_passes_linger(owners: Owners, folder: Path) -> bool:
    """Leave passes at their last batch, as a loop that counts its steps does, and close them much later."""
    rows = share_of(owners.rank, owners.world)
    lingering = []
    for epoch in range(4):
        batches = owners.with_labels(batches_of(rows, even_sizes(len(rows), 500)), epoch)
        for _ in range(len(even_sizes(len(rows), 500))):
            batch = next(batches)
            if lingering:
                lingering.pop().close()
            dist.all_reduce(torch.ones(1))
            owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows), epoch)
        owners.drain()
        lingering.append(batches)
        dist.barrier()
    return True


@pytest.mark.slow
def test_a_pass_closed_after_its_drain_does_not_disturb_the_next(tmp_path: Path) -> None:
    assert run_world(2, tmp_path, old_passes_linger) == [True] * 2
    assert visited(merged(2, tmp_path), 3).all()


def one_has_fewer_batches(owners: Owners, folder: Path) -> None:
    rows = share_of(owners.rank, owners.world)
    train(owners, batches_of(rows, even_sizes(len(rows), 1000 if owners.rank else 250)), epoch=2)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_batches_are_refused(tmp_path: Path) -> None:
    for said in run_world(2, tmp_path, one_has_fewer_batches):
        assert said["kind"] == OwnersError.__name__, said["trace"]
        assert "the ranks are not in step: ranks [1] of 2 drain" in said["error"]
        assert "give every rank the same number of batches" in said["error"]


def snapshot_half_way(owners: Owners, folder: Path) -> int:
    rows = share_of(owners.rank, owners.world)
    batches = batches_of(rows, even_sizes(len(rows), 100))
    for step, batch in enumerate(owners.with_labels(batches, epoch=0)):
        owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows), epoch=0)
        if step == 6:
            owners.drain()
            part = owners.table.snapshot()
            (folder / f"half-{owners.rank}.json").write_bytes(part.encode())
    owners.drain()
    return owners.table.count_visited(0)


@pytest.mark.slow
def test_a_drain_in_mid_epoch_holds_exactly_the_steps_before_it(tmp_path: Path) -> None:
    assert sum(run_world(2, tmp_path, snapshot_half_way)) == NUM_ROWS
    half = merge([Manifest.decode((tmp_path / f"half-{rank}.json").read_bytes()) for rank in range(2)])
    before = np.concatenate([share_of(rank, 2)[:700].numpy() for rank in range(2)])
    assert np.array_equal(np.flatnonzero(visited(half, 0)), np.sort(before))
    table = LabelTable.restore(half, tmp_path / "half")
    assert (table.read(before).max(axis=1) == 11).all()
    after = np.setdiff1d(np.arange(NUM_ROWS), before)
    assert (table.read(after).max(axis=1) == 10).all()


def one_dies(owners: Owners, folder: Path) -> None:
    rows = share_of(owners.rank, owners.world)
    for step, batch in enumerate(owners.with_labels(batches_of(rows, even_sizes(len(rows), 50)), epoch=4)):
        if owners.rank == 1 and step == 5:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.Signals[(folder / "signal").read_text()])
        owners.move(batch.rows, batch.label_logits, guess(batch.rows), epoch=4)
        time.sleep(0.02)
    owners.drain()


def require_named(said: dict[str, str], epoch: int, steps: range, ranks: int) -> None:
    """Check that a failed exchange is reported in one line, with its time and the address of every rank."""
    assert said["kind"] == OwnersError.__name__, said["trace"]
    when = re.search(r"could not be exchanged in epoch (\d+), step (\d+): \S", said["error"])
    assert when is not None, said["error"]
    assert int(when[1]) == epoch
    assert int(when[2]) in steps
    where = re.findall(r"rank (\d) on (\S+) at 127\.0\.0\.1 \(pid \d+\)", said["error"])
    assert where == [(str(rank), os.uname().nodename) for rank in range(ranks)], said["error"]
    assert "\n" not in said["error"]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_is_reported_with_the_addresses_of_all(tmp_path: Path, how: str) -> None:
    (tmp_path / "signal").write_text(how)
    ranks = start_world(3, tmp_path, one_dies, timeout_s=10.0)
    try:
        for rank in (0, 2):
            ranks[rank].join(120)
            assert ranks[rank].exitcode == 0  # it ended by itself, long before torch's own half hour
            said = json.loads((tmp_path / f"said-{rank}.json").read_text())
            # Rank 1 had its sixth batch and had asked for more; the others may be a batch or two behind it.
            require_named(said, epoch=5, steps=range(4, 7 + AHEAD), ranks=3)
            assert f"(pid {(tmp_path / 'pid').read_text()})" in said["error"]
    finally:
        ranks[1].kill()


def one_is_refused(owners: Owners, folder: Path) -> None:
    rows = torch.tensor([1024 + owners.rank])
    owners.move(rows, torch.zeros(1, NUM_CLASSES), guess(rows), epoch=0)
    owners.drain()
    rows = torch.tensor([1024]) if owners.rank == 0 else torch.tensor([5])
    owners.move(rows, torch.zeros(1, NUM_CLASSES), guess(rows), epoch=0)
    owners.drain()
    owners.drain()


def one_is_refused_and_lingers(owners: Owners, folder: Path) -> None:
    """As above, but the owner stays alive until the other rank has received its note."""
    try:
        one_is_refused(owners, folder)
    except PencilError:
        if owners.rank == 1:
            wait_until((folder / "said-0.json").exists)
        raise


def wait_until(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 110
    while not reached() and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.parametrize("target", [one_is_refused, one_is_refused_and_lingers])
@pytest.mark.slow
def test_a_refused_row_ends_every_rank_and_is_named_by_its_owner(tmp_path: Path, target: Rank) -> None:
    said = run_world(2, tmp_path, target)
    assert said[1]["kind"] == PencilError.__name__
    assert "row 1024: visited in epoch 1 already" in said[1]["error"]
    # How gloo reports a rank that has ended depends on which of the two was faster.
    require_named(said[0], epoch=1, steps=range(1), ranks=2)
    if target is one_is_refused_and_lingers:
        assert "rank 1 failed; its log says why" in said[0]["error"]
