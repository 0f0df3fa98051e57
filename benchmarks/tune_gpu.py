"""Time variants of kernel launches side by side: threads, registers, pieces. `launch.plan` uses the best of these.

    PYTHONPATH=src python benchmarks/tune_gpu.py --out $OUT/tune_gpu.json --seconds 30

A variant changes one launch of a call and leaves the others as they are; the time is that of the call's launches up to
the changed one, so that differences inside a group are the launch's own. Variants are compiled first, by several
processes side by side.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.language as tl

from draftproof.kernels.call import Call
from draftproof.kernels.compile import Step, run_all
from draftproof.kernels.launch import plan
from draftproof.kernels.workspace import Workspace
from gpu_cases import BATCHES, SETTINGS, K, V
from gpu_compile import PROCESSES, compile_part, side_by_side
from gpu_inputs import Inputs, drawn
from verify_gpu import cold_sets, median_of_replays, pool, prepared

FILTERS = "top-k 50, top-p 0.9"


class Variant(NamedTuple):
    """A launch in another shape. `sizes`: the kernel's own constants."""

    kernel: str
    sizes: tuple[int, ...]
    warps: int
    registers: int | None = None

    def __str__(self) -> str:
        limit = "" if self.registers is None else f" registers={self.registers}"
        return f"{self.kernel}{list(self.sizes)} warps={self.warps}{limit}"


SCANS = [
    Variant("scan", (step, early), warps, registers)
    for step, early, warps, registers in (
        (8, 0, 4, None), (8, 0, 4, 56), (8, 0, 4, 48), (8, 1, 4, None), (8, 1, 4, 64), (8, 1, 4, 56), (4, 0, 2, None),
        (2, 0, 1, None), (2, 0, 1, 64),
    )
]  # fmt: skip
MATCHES = [
    *(
        Variant("scan", (step, 1), warps, registers)
        for step, warps, registers in (
            (8, 4, None), (8, 4, 64), (8, 4, 56), (8, 4, 48), (8, 4, 40), (4, 4, None), (4, 2, None), (8, 8, None),
        )
    ),
    Variant("scan", (8, 0), 4, None), Variant("scan", (8, 0), 4, 48),
    *(Variant("token", (), warps) for warps in (1, 2, 4, 8)),
]  # fmt: skip
SETTLES = [
    Variant("settle", (), warps, registers)
    for warps, registers in ((8, 48), (8, 64), (8, 80), (8, None), (4, None), (16, None))
]
SIFTS = [Variant("sift", (), warps, registers) for warps, registers in ((8, 128), (8, None), (16, None), (4, None))]
TOKENS = [Variant("token", (), warps, registers) for warps, registers in ((8, 128), (8, None), (4, None), (16, None))]
BLOCKS = [Variant("block_sums", (), warps, registers) for warps, registers in ((4, 80), (4, 64), (4, 128), (8, 80))]


class Group(NamedTuple):
    """Variants measured on one kind of call."""

    dtype: str
    setting: str
    rule: str
    flat: bool
    batches: tuple[int, ...]
    variants: list[Variant]


GROUPS = [
    Group("float32", FILTERS, "token", False, (1, 8, 64, 256), SETTLES),
    Group("float32", "top-p 0.95", "token", False, (1, 8, 64, 256), [*SIFTS, *SETTLES[:2]]),
    Group("float32", "temperature", "token", False, (1, 8, 64, 256), [*SCANS, *TOKENS]),
    Group("bfloat16", "temperature", "token", False, (1, 8, 64, 256), SCANS),
    Group("float32", "greedy", "token", False, (1, 8, 64), MATCHES),
    Group("float32", "temperature", "block", False, (1, 64), BLOCKS),
    Group("bfloat16", FILTERS, "token", False, (1, 8, 64), SETTLES[:3]),
]


def changed(step: Step, variant: Variant) -> Step:
    """Return the launch in the variant's shape."""
    if step.kernel.__name__ != variant.kernel:
        return step
    batch, *others = step.arguments
    if variant.sizes:
        others = [tl.constexpr(size) for size in variant.sizes]
    grid = step.grid
    if variant.kernel == "scan" and variant.sizes[1] != step.arguments[2].value:
        grid = grid[0], grid[2], grid[1]  # an early scan has rows and requests the other way round
    return step._replace(grid=grid, arguments=(batch, *others), warps=variant.warps, registers=variant.registers)


def steps_of(group: Group, given: Inputs, workspace: Workspace, variant: Variant | None) -> list[Step]:
    """Return the launches of a call up to the variant's."""
    B = len(given.tokens)
    sampling = SETTINGS[group.setting]
    draft = sampling if sampling.temperature > 0 else SETTINGS["temperature"]
    call = Call(given.target, given.tokens, given.draft, prepared(given, [sampling] * B, [draft] * B), group.rule)
    steps = plan(call, workspace, overlap=True)
    if variant is None:
        return steps
    # what `settle` leaves to the kernels after it belongs to its time
    search = ("settle", "sift", "settle_deep")
    upto = search if variant.kernel in search else (variant.kernel,)
    last = max(n for n, step in enumerate(steps) if step.kernel.__name__ in upto)
    return [changed(step, variant) for step in steps[: last + 1]]


def all_plans(groups: list[Group]) -> Iterator[list[Step]]:
    """Yield the launches of every variant and batch size, to be compiled."""
    one = torch.ones(1, dtype=torch.long, device="cuda")
    for group in groups:
        x = torch.zeros(1, K + 1, V, dtype=getattr(torch, group.dtype), device="cuda")
        for B in BATCHES:
            given = Inputs(x.expand(B, -1, -1), x[:, :K].expand(B, -1, -1), one.expand(B, K).contiguous(),
                           *(one.repeat(B) for _ in range(3)))  # fmt: skip
            workspace = Workspace.empty(B, K, V, "cuda")
            for variant in (None, *group.variants):
                yield steps_of(group, given, workspace, variant)


def measured(groups: list[Group], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the times of all variants, as far as time allows."""
    start = time.time()
    for dtype, flat in dict.fromkeys((group.dtype, group.flat) for group in groups):
        given = pool(dtype, flat)
        given = replace(given, tokens=drawn(given.draft, SETTINGS[FILTERS]))
        for B in (64, 1, 8, 256):
            each = cold_sets(given, B)
            workspace = Workspace.empty(B, K, V, "cuda")
            for group in (g for g in groups if (g.dtype, g.flat) == (dtype, flat) and B in g.batches):
                timed([steps_of(group, one, workspace, None) for one in each])  # warm-up
                for variant in (None, *group.variants):
                    if time.time() - start > seconds:
                        return
                    plans = [steps_of(group, one, workspace, variant) for one in each]
                    name = "whole call, as planned" if variant is None else str(variant)
                    line = {"dtype": dtype, "setting": group.setting, "rule": group.rule, "flat": flat, "B": B}
                    yield {**line, "variant": name, **timed(plans)}


def timed(plans: list[list[Step]]) -> dict[str, Any]:
    """Return the time of a call, or the error of a variant that does not fit the device."""

    def all_sets() -> None:
        for steps in plans:
            run_all(steps, steps[0].arguments[0].target.device)

    try:
        return {"time": round(median_of_replays(all_sets, len(plans), 20), 1)}
    except Exception as error:  # reported for this variant; the others go on
        return {"error": repr(error)[:200]}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a table: one line per variant, a column per batch size."""
    rows: dict[tuple[str, ...], dict[int, Any]] = {}
    for line in lines:
        key = (line["dtype"], line["setting"], line["rule"], "flat" if line["flat"] else "zipf", line["variant"])
        rows.setdefault(key, {})[line["B"]] = line.get("time", "-")
    batches = (1, 8, 64, 256)
    body = [f"{' '.join(key):92}" + "".join(f"{row.get(B, ''):>8}" for B in batches) for key, row in rows.items()]
    return "\n".join([f"{'':92}" + "".join(f"{B:>8}" for B in batches), *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tune_gpu.json"))
    parser.add_argument("--seconds", type=float, default=30.0, help="for measuring, after compiling")
    parser.add_argument("--only", nargs="+", help="settings")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups = [group for group in GROUPS if not options.only or group.setting in options.only]
    if options.compile:
        return compile_part(all_plans(groups), *options.compile)
    start = time.time()
    side_by_side(__file__, PROCESSES, *(["--only", *options.only] if options.only else []))
    lines: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for line in measured(groups, options.seconds):
        lines.append(line)
        options.out.write_text(json.dumps(lines, indent=1) + "\n")
    print(table(lines))
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
