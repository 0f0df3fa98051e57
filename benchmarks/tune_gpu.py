"""Ways to launch the kernels, side by side: threads, registers, pieces. What `launch.plan` uses was chosen by this.

    PYTHONPATH=src python benchmarks/tune_gpu.py --out $OUT/tune_gpu.json --seconds 200

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

from draftproof.kernels import Workspace
from draftproof.kernels.call import Call
from draftproof.kernels.launch import Step, plan
from gpu_cases import SETTINGS, K, V
from gpu_compile import PROCESSES, side_by_side
from gpu_inputs import Inputs, drawn
from verify_gpu import cold_sets, launch, median_of_replays, pool, prepared

FILTERS = "top-k 50, top-p 0.9"


class Variant(NamedTuple):
    """A launch of another shape. `size`: the kernel's own constexpr; `tiles`, `segment` (bytes): the scan's."""

    kernel: str
    size: int | None
    warps: int
    registers: int | None = None
    tiles: int | None = None
    segment: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(self._fields, self, strict=True) if value is not None)


SCANS = [
    Variant("scan", step, warps, None, tiles, segment)
    for step, warps, tiles in ((8, 4, 1), (8, 4, 2), (4, 2, 1), (4, 2, 2), (2, 1, 1), (2, 1, 2), (2, 1, 4))
    for segment in (64, 128)
]
SETTLES = [
    Variant("settle", lines, warps, registers)
    for lines, warps, registers in (
        (16, 8, None),
        (16, 8, 80),
        (16, 8, 64),
        (8, 8, None),
        (8, 8, 64),
        (16, 4, None),
        (16, 4, 128),
        (8, 4, None),
        (32, 8, 80),
    )
]
DEEPS = [Variant("settle_deep", lines, warps) for lines, warps in ((16, 16), (32, 16), (16, 8), (8, 16))]
TOKENS = [Variant("token", None, warps) for warps in (4, 8, 16)]
BLOCKS = [Variant("block_sums", None, warps, registers) for warps, registers in ((4, None), (8, None), (4, 64))]


class Group(NamedTuple):
    """What is measured on one kind of call."""

    dtype: str
    setting: str
    rule: str
    flat: bool
    batches: tuple[int, ...]
    variants: list[Variant]


GROUPS = [
    Group("bfloat16", "temperature", "token", False, (1, 8, 64, 256), SCANS),
    Group("float32", "temperature", "token", False, (1, 8, 64, 256), [v for v in SCANS if v.segment == 128]),
    Group("float32", FILTERS, "token", False, (1, 64, 256), SETTLES),
    Group("bfloat16", FILTERS, "token", False, (1, 64), SETTLES),
    Group("float32", "top-p 0.95", "token", False, (1, 64, 256), [*SETTLES[1:3], *DEEPS]),
    Group("float32", "greedy", "token", False, (1, 8), [v for v in SCANS if v.segment == 128]),
    Group("float32", "temperature", "token", False, (1, 64), TOKENS),
    Group("float32", "temperature", "block", False, (64,), BLOCKS),
    Group("float32", "top-p 0.95", "token", True, (64,), DEEPS),
]


def changed(step: Step, variant: Variant) -> Step:
    """The launch in the variant's shape."""
    if step.kernel.__name__ != variant.kernel:
        return step
    batch, *others = step.arguments
    grid = step.grid
    if variant.tiles is not None and variant.segment is not None:
        parts = {"SEGMENT": batch.target, "DRAFT_SEGMENT": batch.draft}
        segments = {name: tl.constexpr(variant.segment // x.element_size()) for name, x in parts.items()}
        batch = batch._replace(traits=batch.traits._replace(TILES=tl.constexpr(variant.tiles), **segments))
        grid = (-(-batch.sizes.T // variant.tiles), *step.grid[1:])
    if variant.size is not None:
        others = [tl.constexpr(variant.size)]
    return Step(step.kernel, grid, (batch, *others), variant.warps, variant.registers)


def steps_of(group: Group, given: Inputs, workspace: Workspace, variant: Variant | None) -> list[Step]:
    """The launches of a call up to the variant's."""
    B = len(given.tokens)
    sampling = SETTINGS[group.setting]
    draft = sampling if sampling.temperature > 0 else SETTINGS["temperature"]
    call = Call(given.target, given.tokens, given.draft, prepared(given, [sampling] * B, [draft] * B), group.rule)
    steps = plan(call, workspace, overlap=True)
    if variant is None:
        return steps
    upto = [step.kernel.__name__ for step in steps].index(variant.kernel)
    if variant.kernel == "settle" and len(steps) > upto + 2:
        upto += 1  # with what it leaves to the next
    return [changed(step, variant) for step in steps[: upto + 1]]


def compile_part(part: int, parts: int) -> None:
    """Compile every so-many-th variant, into the cache on disk."""
    jobs = [(group, variant) for group in GROUPS for variant in (None, *group.variants)]
    for group, variant in jobs[part::parts]:
        x = torch.zeros(1, K + 1, V, dtype=getattr(torch, group.dtype), device="cuda")
        one = torch.ones(1, dtype=torch.long, device="cuda")
        for B in (1, 8):  # the launches of a small and of a large batch
            given = Inputs(x.expand(B, -1, -1), x[:, :K].expand(B, -1, -1), one.expand(B, K).contiguous(),
                           *(one.repeat(B) for _ in range(3)))  # fmt: skip
            launch(steps_of(group, given, Workspace.empty(B, K, V, "cuda"), variant))
    torch.cuda.synchronize()


def measured(groups: list[Group], seconds: float) -> Iterator[dict[str, Any]]:
    start = time.time()
    for dtype, flat in (("float32", False), ("bfloat16", False), ("float32", True)):
        given = pool(dtype, flat)
        given = replace(given, tokens=drawn(given.draft, SETTINGS[FILTERS]))
        for B in (64, 1, 8, 256):
            each = cold_sets(given, B)
            workspace = Workspace.empty(B, K, V, "cuda")
            for group in (g for g in groups if (g.dtype, g.flat) == (dtype, flat) and B in g.batches):
                for variant in (None, *group.variants):
                    if time.time() - start > seconds:
                        return
                    plans = [steps_of(group, one, workspace, variant) for one in each]
                    name = "whole call, as planned" if variant is None else str(variant)
                    line = {"dtype": dtype, "setting": group.setting, "rule": group.rule, "flat": flat, "B": B}
                    yield {**line, "variant": name, **timed(plans)}


def timed(plans: list[list[Step]]) -> dict[str, Any]:
    def all_sets() -> None:
        for steps in plans:
            launch(steps)

    try:
        return {"time": round(median_of_replays(all_sets, len(plans), 20), 1)}
    except Exception as error:  # a variant that does not fit the device says so, and the others go on
        return {"error": repr(error)[:200]}


def table(lines: list[dict[str, Any]]) -> str:
    """One line a variant, a column a batch size."""
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
    parser.add_argument("--seconds", type=float, default=200.0, help="for measuring, after compiling")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        return compile_part(*options.compile)
    start = time.time()
    side_by_side(__file__, PROCESSES)
    lines: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for line in measured(GROUPS, options.seconds):
        lines.append(line)
        options.out.write_text(json.dumps(lines, indent=1) + "\n")
    print(table(lines))
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
