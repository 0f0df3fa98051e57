"""Between host and device: numbers are sent without waiting, and fetched in one wait.

Whoever looks at a tensor on a GPU (`bool(x.any())`, `x.tolist()`, `x[mask]`) waits for all that was asked of it before.
Numbers that lie on the host are looked at as numpy arrays, which a tensor elsewhere refuses to be: such a look never
waits.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

HOST: Final = "cpu"
"""The device type whose values can be read without a synchronisation. Tests replace it to run the GPU paths on a CPU."""


def is_cpu(device: torch.device) -> bool:
    """Tell whether reading a tensor there costs no synchronisation."""
    return device.type == HOST


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Let it be the current device meanwhile: kernels of our own are launched on that, wherever their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """These numbers on the device. Small copies are taken down at once, so that nobody waits and nothing is lost."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


class AsyncCopy:
    """A tensor on its way to the host. Reading it waits for what was asked of the device before it, and no longer."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> npt.NDArray[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.numpy()
