"""Copy small data between CPU and GPU: to the GPU without a sync, from the GPU with one.

Reading a GPU tensor (`bool(x.any())`, `x.tolist()`, `x[mask]`) waits for all work queued before it. Code that must not
sync reads values through numpy, which refuses GPU tensors: such a read cannot become a hidden sync.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

HOST: Final = "cpu"
"""Device type whose values can be read without a sync. Tests replace it to run the GPU paths on a CPU."""


KERNEL_DEVICES: Final = ("cuda",)
"""Device types on which Triton kernels run. Tests add the CPU, where Triton interprets them."""


def runs_kernels(device: torch.device) -> bool:
    """Tell whether our Triton kernels run on a device: one of the right type, with Triton installed."""
    return device.type in KERNEL_DEVICES and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def is_cpu(device: torch.device) -> bool:
    """Tell whether reading a tensor on this device costs no sync."""
    return device.type == HOST


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this the current CUDA device inside the context: our kernels launch there, not where their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Copy these numbers to the device without a sync.

    The driver stages small copies immediately: no blocking, and the source may be freed.
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


class AsyncCopy:
    """A copy of a tensor to the CPU, started at construction. `read` syncs with this copy only, not with later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.numpy()
