"""Host copies: tensors on their way from the GPU, and points in its queue of work.

    loss = HostCopy(losses.sum())       # returns at once
    ...                                 # more steps are launched
    loss.read()                         # waits for this copy, not for what was launched since

The waiting thread sleeps. CUDA polls by default, which would take a processor away from the threads that read
images. On a CPU everything is computed already, and there is nothing to wait for.
"""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host; only its reader waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor.detach(), non_blocking=True)
        self._arrived = launched_so_far(tensor.device)

    def read(self) -> Tensor:
        """Wait for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def launched_so_far(device: torch.device) -> torch.cuda.Event | None:
    """An event that is reached once the GPU has done everything launched up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
