import ipaddress
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from label_making import names, new_table, predicted

from pencil_scale.labels.exchange import OwnersError, Peer, gloo_address
from pencil_scale.labels.owners import AHEAD, Batch, HostCopy, Owners, launched_so_far, owned_parts
from pencil_scale.labels.table import LabelTable
from pencil_scale.method.evidence import TOP
from pencil_scale.storage.errors import PencilError

NUM_ROWS, NUM_CLASSES = 3000, TOP + 1  # one class of a prediction is not kept


@pytest.fixture
def table(tmp_path: Path) -> LabelTable:
    return new_table(tmp_path, np.arange(NUM_ROWS) % NUM_CLASSES, names(NUM_CLASSES))


def guess(rows: torch.Tensor) -> torch.Tensor:
    """What a network would predict, as a function of the row alone."""
    return torch.from_numpy(predicted(rows.numpy(), NUM_CLASSES))


def batches_of(rows: torch.Tensor, size: int) -> Iterator[Batch]:
    for piece in rows.split(size):
        yield Batch(rows=piece, images=None, weight=torch.ones(len(piece)))


def shuffled(seed: int = 0) -> torch.Tensor:
    return torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch_size", [1, 64, 257, 3000])
def test_one_rank_needs_no_process_group(table: LabelTable, batch_size: int) -> None:
    rows = shuffled()[: 100 if batch_size == 1 else NUM_ROWS]
    with Owners(table) as owners:
        for epoch in range(2):
            seen = []
            for batch in owners.with_labels(batches_of(rows, batch_size), epoch):
                assert torch.equal(batch.noisy_class, batch.rows % NUM_CLASSES)
                assert torch.equal(batch.label_logits.argmax(1), batch.noisy_class)
                assert batch.label_logits.max() == 10.0 * (epoch + 1)
                owners.move(batch.rows, batch.label_logits * 2, guess(batch.rows), epoch)
                seen.append(batch.rows)
            owners.drain()
            assert torch.equal(torch.cat(seen), rows)
            assert table.count_visited(epoch) == len(rows)
    assert np.array_equal(table.read(rows).max(axis=1), np.full(len(rows), 40.0))
    assert np.array_equal(table.read(rows, "predicted_class"), guess(rows)[:, :TOP])
    assert np.array_equal(table.read(rows, "predicted_log_p"), guess(rows)[:, TOP:].half())


def test_a_pinned_class_wins_over_the_class_of_the_stream(tmp_path: Path) -> None:
    with Owners(new_table(tmp_path, np.arange(6) % 5, names(5), pins={3: 1})) as owners:
        stream = [Batch(torch.tensor([3, 4]), None, torch.ones(2), noisy_class=torch.tensor([3, 4]))]
        (batch,) = owners.with_labels(stream)
        owners.drain()
    assert batch.noisy_class.tolist() == [1, 4]
    assert batch.label_logits.tolist() == [[0, 10, 0, 0, 0], [0, 0, 0, 0, 10]]


class Step:
    """A step on a device, and whether a thread has waited for it."""

    def __init__(self) -> None:
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True


def test_no_more_steps_are_under_way_than_labels_are_fetched_for(
    table: LabelTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    monkeypatch.setattr(
        "pencil_scale.labels.owners.launched_so_far", lambda _: steps.append(Step()) or steps[-1]
    )
    with Owners(table) as owners:
        for batch in owners.with_labels(batches_of(shuffled(), 100)):
            assert all(step.waited_for for step in steps[: max(0, len(steps) - AHEAD)])
            owners.mark(batch.rows, guess(batch.rows), epoch=0)
        owners.drain()
    assert len(steps) == 30
    assert owners.device_s > 0


def test_a_gpu_error_is_reported_as_it_is(table: LabelTable, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Step):
        def synchronize(self) -> None:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("pencil_scale.labels.owners.launched_so_far", lambda _: Fails())
    with Owners(table) as owners:
        owners.mark(torch.arange(3), guess(torch.arange(3)), epoch=0)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            owners.drain()


def test_labels_are_fetched_some_batches_ahead_and_not_further(table: LabelTable) -> None:
    pulled = []

    def watched() -> Iterator[Batch]:
        for number, batch in enumerate(batches_of(shuffled(), 300)):
            pulled.append(number)
            yield batch

    with Owners(table) as owners:
        for number, _ in enumerate(owners.with_labels(watched())):
            assert pulled[-1] == min(number + AHEAD, 9)
        owners.drain()


def test_marks_alone_move_no_label(table: LabelTable) -> None:
    before = table.read(np.arange(NUM_ROWS))
    with Owners(table) as owners:
        for batch in owners.with_labels(batches_of(shuffled(), 500)):
            owners.mark(batch.rows, guess(batch.rows), epoch=0)
        owners.drain()
    assert table.count_visited(0) == NUM_ROWS
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), before)
    expected = guess(torch.arange(NUM_ROWS))[:, TOP:].half()
    assert np.array_equal(table.read(np.arange(NUM_ROWS), "predicted_log_p"), expected)


def test_a_row_moved_twice_in_an_epoch_is_refused_by_name(table: LabelTable) -> None:
    owners = Owners(table)
    owners.move(torch.tensor([7, 8]), torch.zeros(2, NUM_CLASSES), guess(torch.tensor([7, 8])), epoch=0)
    owners.drain()
    owners.move(torch.tensor([9, 8]), torch.zeros(2, NUM_CLASSES), guess(torch.tensor([9, 8])), epoch=0)
    with pytest.raises(PencilError, match="row 8: visited in epoch 1 already"):
        owners.drain()
    with pytest.raises(PencilError, match="row 8"):
        owners.move(torch.tensor([10]), torch.zeros(1, NUM_CLASSES), guess(torch.tensor([10])), epoch=0)
    owners.close()


def test_the_tensor_given_to_move_may_be_reused_at_once(table: LabelTable) -> None:
    with Owners(table) as owners:
        logits = torch.ones(1, NUM_CLASSES)
        owners.move(torch.tensor([5]), logits, guess(torch.tensor([5])), epoch=0)
        logits.zero_()
        owners.drain()
    assert table.read([5]).tolist() == [[1] * NUM_CLASSES]


def test_a_second_pass_without_a_drain_is_refused(table: LabelTable) -> None:
    with Owners(table) as owners:
        list(owners.with_labels(batches_of(shuffled(), 1000)))
        with pytest.raises(OwnersError, match=r"call drain\(\) on every rank first"):
            next(owners.with_labels(batches_of(shuffled(), 1000)))
        owners.drain()


def test_a_pass_left_early_can_be_drained_and_started_again(table: LabelTable) -> None:
    with Owners(table) as owners:
        for batch in owners.with_labels(batches_of(shuffled(), 100)):
            owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows), epoch=0)
            break
        owners.drain()
        assert table.count_visited(0) == 100
        assert len(list(owners.with_labels(batches_of(shuffled(), 1000)))) == 3
        owners.drain()


def test_a_stream_that_fails_fails_the_pass_with_its_own_error(table: LabelTable) -> None:
    def broken() -> Iterator[Batch]:
        yield from batches_of(shuffled()[:10], 5)
        raise ValueError("the stream broke")

    with Owners(table) as owners:
        with pytest.raises(ValueError, match="the stream broke"):
            list(owners.with_labels(broken()))
        owners.drain()


def test_leaving_with_unsent_moves_says_that_they_are_lost(table: LabelTable) -> None:
    with pytest.raises(OwnersError, match="1 writes never reached their owners"), Owners(table) as owners:
        owners.move(torch.tensor([5]), torch.zeros(1, NUM_CLASSES), guess(torch.tensor([5])), epoch=0)
    owners.close()  # a second time does no harm
    assert table.count_visited(0) == 0


def test_writes_of_two_epochs_need_a_drain_between_them(table: LabelTable) -> None:
    with Owners(table) as owners:
        owners.mark(torch.tensor([5]), guess(torch.tensor([5])), epoch=0)
        with pytest.raises(OwnersError, match="another epoch or stage are not sent yet; call drain"):
            owners.mark(torch.tensor([5]), guess(torch.tensor([5])), epoch=1)
        owners.drain()
        owners.mark(torch.tensor([5]), guess(torch.tensor([5])), epoch=1)
        owners.drain()
    assert table.count_visited(1) == 1


def test_rows_outside_the_table_are_refused_where_they_are_asked_for(table: LabelTable) -> None:
    with Owners(table) as owners:
        with pytest.raises(PencilError, match="row 3000: outside the table's 3,000 rows"):
            list(owners.with_labels(batches_of(torch.tensor([3000]), 1)))
        with pytest.raises(PencilError, match="row -1: outside"):
            owners.mark(torch.tensor([-1]), guess(torch.tensor([-1])), epoch=0)
        for shape in [(2, NUM_CLASSES), (1, NUM_CLASSES + 1)]:
            with pytest.raises(
                OwnersError, match=rf"label logits of shape \(.*\); expected \(1, {NUM_CLASSES}\)"
            ):
                owners.move(torch.tensor([1]), torch.zeros(shape), guess(torch.tensor([1])), epoch=0)
        width = 2 * TOP
        with pytest.raises(
            OwnersError, match=rf"predictions of shape \(2, {width}\); expected \(1, {width}\)"
        ):
            owners.mark(torch.tensor([1]), guess(torch.tensor([1, 2])), epoch=0)
        owners.drain()


def test_a_rank_must_have_the_parts_it_owns(table: LabelTable, tmp_path: Path) -> None:
    some = LabelTable.restore(table.manifest, tmp_path / "some", parts=[0, 2])
    with pytest.raises(OwnersError, match="rank 0 of 1 owns part 1"):
        Owners(some)


def test_several_ranks_need_a_process_group(table: LabelTable) -> None:
    with pytest.raises(OwnersError, match=r"torch\.distributed is not initialised"):
        Owners(table, rank=0, world=2)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_part_has_one_owner(world: int) -> None:
    owned = [part for rank in range(world) for part in owned_parts(5, rank, world)]
    assert sorted(owned) == [0, 1, 2, 3, 4]


def test_the_address_of_a_rank_is_that_of_the_interface_gloo_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert str(Peer(3, "node-7", gloo_address(), 4711)) == "rank 3 on node-7 at 127.0.0.1 (pid 4711)"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    assert gloo_address() == "interface no-such-one"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert ipaddress.ip_address(gloo_address())


def test_a_copy_keeps_what_was_there_when_it_was_made() -> None:
    numbers = torch.arange(3.0)
    copy = HostCopy(numbers)
    numbers.zero_()
    assert copy.read().tolist() == [0.0, 1.0, 2.0]


def test_a_cpu_has_nothing_to_wait_for() -> None:
    assert launched_so_far(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_is_read_while_the_gpu_computes_what_was_launched_after_it() -> None:
    numbers = torch.arange(3.0, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    copy = HostCopy(numbers)
    numbers.zero_()
    for _ in range(200):  # tenths of a second
        matrix = matrix @ matrix
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
    assert not torch.cuda.current_stream().query()
