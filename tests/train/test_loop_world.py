"""The loop on two ranks over gloo: one gradient, one loss, and one state of the network."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import SmallRun
from test_loop import ONE_EPOCH, blobs
from test_step import STAGE, batch_of, joined, linear, weights_after
from torch.nn.parallel import DistributedDataParallel

from pencil_scale.labels.owners import Batch
from pencil_scale.method.schedule import Stage
from pencil_scale.train.checkpoints import Progress
from pencil_scale.train.preparation import build_stepper
from pencil_scale.train.ranks import Ranks
from pencil_scale.train.step import Stepper, StepResult

WORLD = 2
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pencil_scale.train.preparation", "pytest", "loops"])

pytestmark = pytest.mark.slow


def run_rank(rank: int, folder: Path, target: Callable[[int, Path], Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        said = target(rank, folder)
    except Exception as error:
        said = {"error": str(error), "kind": type(error).__name__, "trace": traceback.format_exc()}
    torch.save(said, folder / f"said-{rank}.pt")
    os._exit(0)


def run_world(folder: Path, target: Callable[[int, Path], Any]) -> list[Any]:
    ranks = [
        CONTEXT.Process(target=run_rank, args=(rank, folder, target), daemon=True) for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(folder / f"said-{rank}.pt") for rank in range(WORLD)]


# What each rank has of four steps: uneven, unreadable, and nothing at all.
SHARES = [
    ([1, 1, 1, 1, 1], [1, 0]),
    ([0, 0, 0], [1, 1, 1, 1]),
    ([1, 1, 1, 1], [1]),
    ([1, 0, 1], [0, 0]),
]


def take_steps(rank: int, accumulation: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stepper = Stepper(model, optimizer, accumulation=accumulation)
    for nth, shares in enumerate(SHARES):
        stepper.step(batch_of(shares[rank], seed=10 * nth + rank), STAGE, nth, len(SHARES))
    return [weight.detach() for weight in model.parameters()]


def singly(rank: int, folder: Path) -> list[torch.Tensor]:
    return take_steps(rank, accumulation=1)


def in_threes(rank: int, folder: Path) -> list[torch.Tensor]:
    return take_steps(rank, accumulation=3)


@pytest.mark.parametrize(
    ("target", "groups"), [(singly, [[0], [1], [2], [3]]), (in_threes, [[0, 1, 2], [3]])]
)
def test_two_ranks_with_uneven_shares_move_the_weights_as_one_with_all_samples(
    tmp_path: Path, target: Callable[[int, Path], Any], groups: list[list[int]]
) -> None:
    def everything(nth: int) -> list[Batch]:
        return [batch_of(shares, seed=10 * nth + rank) for rank, shares in enumerate(SHARES[nth])]

    batches = [joined(*(batch for nth in group for batch in everything(nth))) for group in groups]
    expected = weights_after(linear(), batches)
    for found in run_world(tmp_path, target):
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there)


class RankRun(SmallRun):
    """One rank of a run; it keeps what it reported, and a copy of its network whenever it is saved."""

    def __init__(self, rank: int, folder: Path, *overrides: str, **pace: Any) -> None:
        images, classes = blobs()
        overrides = (*ONE_EPOCH, "optimizer.tuned_batch=2", "optimizer.batch_per_worker=2", *overrides)
        super().__init__(folder / f"rank-{rank}", images, classes, *overrides, **pace)
        self.ranks = Ranks(rank, WORLD, dist.new_group(backend="gloo"))
        self.seen: list[dict[str, torch.Tensor]] = []
        self.sums: list[torch.Tensor] = []

    def stepper(self) -> Stepper:
        stepper = build_stepper(self.config, self.model, self.optimizer, torch.device("cpu"), WORLD)
        assert isinstance(stepper, Stepper)
        step = stepper.step

        def noted(*what: Any) -> StepResult:
            result = step(*what)
            self.sums.append(result.sums.clone())
            return result

        stepper.step = noted
        return stepper

    def batches(self, rows: torch.Tensor) -> Any:
        # Rank 0 has all classes below five, rank 1 the others, so their statistics differ.
        mine = rows[(rows % 10 >= 5) == bool(self.ranks.rank)]
        return super().batches(mine)

    def epoch(self, epoch: int) -> Any:
        return 50, super().epoch(epoch)[1]

    def look(self) -> None:
        self.seen.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})

    def save(self, progress: Progress) -> None:
        self.look()

    def close_epoch(self, stage: Stage, progress: Progress, figures: dict[str, float]) -> None:
        super().close_epoch(stage, progress, figures)
        self.look()

    def reported(self) -> dict[str, Any]:
        figures = {name: self.epochs[0][name] for name in ("loss", "balanced_agreement")}
        sums = torch.stack(self.sums)
        return {"seen": self.seen, "steps": self.steps, "figures": figures, "sums": sums}


def an_epoch(rank: int, folder: Path) -> dict[str, Any]:
    run = RankRun(rank, folder, save_every=20, max_unreadable_share=0.1)
    run.unreadable = {0, 1, 2}  # all of them rank 0's
    run.run()
    return run.reported()


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(tmp_path_factory.mktemp("epoch"), an_epoch)


def test_every_rank_evaluates_the_network_that_is_saved(epoch: list[dict[str, Any]]) -> None:
    assert "kind" not in epoch[0], epoch[0]
    one, other = (rank["seen"] for rank in epoch)
    assert len(one) == 3  # after 20 and 40 steps, and at the epoch's end
    for here, there in zip(one, other, strict=True):
        assert any("running_var" in name for name in here)
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_the_loss_is_that_of_all_ranks(epoch: list[dict[str, Any]]) -> None:
    loss, weight, *_ = sum(rank["sums"].sum(0) for rank in epoch)
    assert weight == 197
    for rank in epoch:
        assert rank["figures"]["loss"] == pytest.approx(float(loss / weight))
        assert rank["steps"] == [(50, pytest.approx(float(loss / weight)))]
        assert rank["figures"] == epoch[0]["figures"]


def one_is_ruined(rank: int, folder: Path) -> None:
    run = RankRun(rank, folder, save_every=10)
    if rank == 1:
        step = run.optimizer.step
        buffer = next(buffer for name, buffer in run.model.named_buffers() if "running_mean" in name)
        run.optimizer.step = lambda: (step(), buffer.fill_(torch.nan))
    run.run()


def test_what_is_not_finite_on_one_rank_ends_all_of_them_with_the_same_error(tmp_path: Path) -> None:
    for said in run_world(tmp_path, one_is_ruined):
        assert said["kind"] == "PencilError", said["trace"]
        assert "epoch 1 (backbone), around steps 1 to 10: not finite: " in said["error"]
        assert "running_mean" in said["error"]
