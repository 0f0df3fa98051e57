"""Compile kernels by several processes side by side: one after the other takes longer than measuring."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import triton

from draftproof.kernels import compile as launching
from draftproof.kernels.compile import Step, compile_step

PROCESSES = min(14, os.cpu_count() or 1)


def side_by_side(program: str, processes: int, *more: str) -> None:
    """Run `program --compile n processes` and `more` for each n; the kernels stay in Triton's cache on disk."""
    start, environment = time.time(), os.environ | {"OMP_NUM_THREADS": "1"}
    parts = [
        subprocess.Popen([sys.executable, program, "--compile", str(n), str(processes), *more], env=environment)
        for n in range(processes)
    ]
    codes = [part.wait() for part in parts]
    if any(codes):
        raise RuntimeError(f"a process that compiles failed: exit codes {codes}")
    print(f"compiled in {time.time() - start:.0f} s", flush=True)


def compile_part(plans: Iterable[list[Step]], part: int, parts: int) -> None:
    """Compile every `parts`-th of the different kernels in these launches, without launching them."""
    different = {_name(step, n > 0): (step, n > 0) for steps in plans for n, step in enumerate(steps)}
    for name in sorted(different, key=_slowest_first)[part::parts]:
        step, overlap = different[name]
        compile_step(step, overlap=overlap)


SLOW = ("token", "settle_deep", "settle", "coupled", "block_walk")


def _slowest_first(name: str) -> tuple[int, str]:
    kernel = name.split()[0]
    return SLOW.index(kernel) if kernel in SLOW else len(SLOW), name


def _name(step: Step, overlap: bool) -> str:
    """Return a name that is equal for launches of the same compiled kernel, among those that are measured."""
    batch, *others = step.arguments
    kinds = [x.dtype for x in batch if isinstance(x, torch.Tensor)]
    known = [getattr(value, "value", value) for value in (*batch.traits, *others)]
    divided = [size % 16 == 0 for size in (batch.sizes.V, batch.sizes.R, *batch.strides)]
    plain = [value for value in known if not isinstance(value, tuple)]
    return f"{step.kernel.__name__} {plain} {kinds} {divided} {step.warps} {step.registers} {overlap}"


@contextmanager
def counted() -> Iterator[list[str]]:
    """List the kernels that are compiled inside, in this process: those that compiling first has missed."""
    names: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else names.append(src.name)
    try:
        yield names
    finally:
        triton.knobs.compilation.listener = before


@contextmanager
def collected() -> Iterator[list[list[Step]]]:
    """Collect what would be launched inside, as plans, instead of launching it."""
    plans: list[list[Step]] = []

    def keep(step: Step, *, overlap: bool) -> None:
        if not overlap:
            plans.append([])
        plans[-1].append(step)

    run, launching.run = launching.run, keep
    try:
        yield plans
    finally:
        launching.run = run
