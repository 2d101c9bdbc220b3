from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from label_making import names, new_table, predicted

from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.labels.table import LabelTable

pytestmark = pytest.mark.gpu
NUM_ROWS, NUM_CLASSES, BATCH = 4096, 14, 256


@pytest.fixture
def table(tmp_path: Path) -> LabelTable:
    return new_table(tmp_path, np.arange(NUM_ROWS) % NUM_CLASSES, names(NUM_CLASSES))


def guess(rows: torch.Tensor) -> torch.Tensor:
    """What a network would predict, as a function of the row alone."""
    return torch.from_numpy(predicted(rows.numpy(), NUM_CLASSES))


def batches() -> Iterator[Batch]:
    for rows in torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0)).split(BATCH):
        yield Batch(rows=rows, images=None, weight=torch.ones(len(rows)))


def keep_the_gpu_busy() -> None:
    matrix = torch.rand(8192, 8192, device="cuda")
    for _ in range(20):
        matrix = torch.tanh(matrix @ matrix)


def fresh_logits() -> torch.Tensor:
    return torch.full((BATCH, NUM_CLASSES), 2.0, device="cuda").sqrt()


def test_labels_are_copied_to_the_gpu_and_back(table: LabelTable) -> None:
    with Owners(table, device="cuda") as owners:
        for epoch in range(3):
            for batch in owners.with_labels(batches(), epoch):
                assert batch.label_logits.is_cuda
                assert batch.noisy_class.is_cuda
                owners.move(batch.rows, batch.label_logits + 1, guess(batch.rows).cuda(), epoch)
            owners.drain()
    expected = np.eye(NUM_CLASSES, dtype=np.float32)[np.arange(NUM_ROWS) % NUM_CLASSES] * 10 + 3
    assert np.array_equal(table.read(np.arange(NUM_ROWS)), expected)


def test_move_returns_while_the_gpu_still_computes_what_is_moved(table: LabelTable) -> None:
    with Owners(table, device="cuda") as owners:
        # Once to warm up: the first use of a kernel, and the first pinned buffer of a size, wait for the GPU.
        keep_the_gpu_busy()
        predictions = guess(torch.arange(BATCH)).cuda()
        owners.move(torch.arange(BATCH, 2 * BATCH), fresh_logits(), predictions, epoch=0)
        owners.drain()
        rows = torch.arange(BATCH)
        keep_the_gpu_busy()
        logits = fresh_logits()
        owners.move(rows, logits, predictions, epoch=0)
        assert not torch.cuda.current_stream().query()  # the copy waits in the stream; no thread waits for it
        logits.zero_()  # after the copy, in the stream's order
        owners.drain()
    assert np.allclose(table.read(rows.numpy()), np.sqrt(2.0))
    assert table.count_visited(0) == 2 * BATCH
