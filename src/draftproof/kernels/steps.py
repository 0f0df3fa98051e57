"""One launch after the other, each of a kernel that is compiled once and then found again.

Triton looks at every argument of a launch to find the kernel that was compiled for such arguments. That takes the host
twice as long as the launch itself, and is done here once for all calls of a kind.
"""

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton


class Step(NamedTuple):
    """One launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    kind: Hashable
    """The same where Triton would compile the kernel alike, but for constants, warps and registers."""
    registers: int | None = None
    """Of a thread, at most; None leaves it to the compiler."""


def overlaps(device: torch.device) -> bool:
    """Whether a launch may start there while the one before it ends."""
    return device.type == "cuda" and _hopper(device)


@lru_cache(maxsize=64)
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def run_all(steps: Iterable[Step], device: torch.device) -> None:
    """Launch these on a device, which need not be the current one. All but the first may start while the one before
    them ends, if their kernels were planned to wait for that themselves."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        for n, step in enumerate(steps):
            run(step, overlap=n > 0 and bool(step.arguments[0].traits.OVERLAP.value))


def run(step: Step, *, overlap: bool) -> None:
    """Launch one step; `overlap`: it may start while the one before it ends."""
    if triton.knobs.runtime.interpret:
        step.kernel[step.grid](*step.arguments)
        return
    constants = tuple(getattr(value, "value", None) for value in step.arguments[1:])
    name = step.kernel.__name__, constants, step.warps, step.registers, overlap, step.kind
    if (compiled := _compiled.get(name)) is None:
        compiled = _compiled[name] = compile_step(step, overlap=overlap)
    compiled[(*step.grid, 1, 1)[:3]](*step.arguments)


_compiled: dict[Hashable, Any] = {}


def compile_step(step: Step, *, overlap: bool) -> Any:
    """The kernel, compiled now or before."""
    limit = {} if step.registers is None else {"maxnreg": step.registers}
    options = {"num_warps": step.warps, "launch_pdl": overlap, **limit}
    return step.kernel.warmup(*step.arguments, grid=step.grid, **options)


def kind_of(traits: Hashable, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> Hashable:
    """What Triton looks at: of a pointer its type and whether 16 divides it, of a whole number whether it is 1, whether
    16 divides it and how long it is. The numbers themselves tell all of that, and most calls share them. `traits`: what
    the kernels' constants follow from."""
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    return traits, tensors[0].device.index, kinds, numbers
