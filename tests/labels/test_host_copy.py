"""What leaves the GPU is what was there when it was sent, and nobody waits for more than that."""

import pytest
import torch

from pencil_scale.labels.courier import HostCopy, launched_so_far


def test_a_copy_keeps_what_was_there_when_it_was_made() -> None:
    numbers = torch.arange(3.0)
    copy = HostCopy(numbers)
    numbers.zero_()
    assert copy.read().tolist() == [0.0, 1.0, 2.0]


def test_on_a_cpu_nothing_is_waited_for() -> None:
    assert launched_so_far(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_is_read_while_the_gpu_goes_on_with_what_came_after_it() -> None:
    numbers = torch.arange(3.0, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    copy = HostCopy(numbers)
    numbers.zero_()
    for _ in range(200):  # tenths of a second
        matrix = matrix @ matrix
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
    assert not torch.cuda.current_stream().query()
