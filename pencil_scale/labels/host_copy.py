"""Host copies: numbers on their way from the GPU, and points in what it has been asked to do.

    loss = HostCopy(losses.sum())       # returns at once
    ...                                 # more steps are launched
    loss.read()                         # waits for this copy, not for what was launched since

Whoever waits is asleep meanwhile: CUDA's usual way is to ask again and again, which takes a whole processor
from those who read images. On a CPU all is done already, and nobody waits.
"""

import torch
from torch import Tensor


class HostCopy:
    """A tensor's copy on the host, from a moment on that only its reader waits for."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor.detach(), non_blocking=True)
        self._arrived = launched_so_far(tensor.device)

    def has_come(self) -> bool:
        """Whether it can be read without waiting."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> Tensor:
        """Wait for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def launched_so_far(device: torch.device) -> torch.cuda.Event | None:
    """What is reached once the GPU has done all that it was asked to up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
