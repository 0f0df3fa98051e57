"""Copy small data between CPU and GPU: to the GPU without a sync, from the GPU with one.

Reading a GPU tensor (`bool(x.any())`, `x.tolist()`, `x[mask]`) waits for all work queued before it. Code that must not
sync reads values through numpy, which refuses GPU tensors: such a read cannot become a hidden sync.
"""

import time
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


class Mark:
    """A moment in a device's queue of work: on a GPU an event, on a CPU the time."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._time = time.perf_counter()

    def seconds_until(self, later: "Mark") -> float:
        """Return the seconds between two moments, both of which have passed."""
        if self._event is None or later._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1e3
