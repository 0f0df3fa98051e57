"""Measure decode attention on a GPU beside the time of reading its keys and values, and beside torch's own.

    PYTHONPATH=src python benchmarks/attention_gpu.py --out benchmarks/results/attention_gpu.json
    PYTHONPATH=src python benchmarks/attention_gpu.py --markdown                   # print that file; needs no GPU
    PYTHONPATH=src python benchmarks/attention_gpu.py --check                      # a million rows, graphs, determinism

Heads as in Llama 3 8B: 32 for queries, 8 for keys, of size 128, bfloat16. A CUDA graph holds many calls, each with a
pool of its own, together several times the L2 cache, so that every call finds it cold; the time is that of a replay
divided by the number of calls, median of many replays. All rows of a call have the same length.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import triton
from torch import Tensor

from draftproof.kernels.attention import AttentionCall, ancestor_bits, decode_attention, plan_attention
from draftproof.kernels.compile import Step, compile_step
from gpu_compile import PROCESSES, side_by_side
from kernels import attention_claims
from verify_gpu import launch_alone, median_of_replays

COLD = 256e6
"""Bytes read in a graph, at least: four times the L2 cache."""

MOST_CALLS = 512
BANDWIDTH = 4.17e6
"""Bytes in a microsecond: a copy on an H200 (docs/verify-on-a-gpu.md)."""


@dataclass(frozen=True)
class Case:
    B: int
    T: int
    context: int
    variant: str = "plain"
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    dtype: str = "bfloat16"
    capacity: int = 0
    """Most tokens of a row, as the engine would say; 0: those it has."""


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1024": {"window": 1024},
    "chunk 3072": {"chunk": 3072},
    "softcap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi_slopes": True},
    "tree": {"ancestors": True},
}
OTHER_MODELS = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "Gemma 2 9B": {"heads": 16, "size": 256},
    "GPT-OSS": {"heads": 64, "size": 64},
    "Llama 2 7B": {"kv_heads": 32},
    "one key head": {"kv_heads": 1},
}
CASES = [
    *(Case(B, T, context) for T in (1, 5, 16) for context in (128, 1024, 4096) for B in (1, 8, 32, 128)),
    *(Case(256, T, 1024) for T in (1, 5, 16)),
    *(Case(B, T, 32768) for T in (1, 5, 16) for B in (1, 8, 32)),
    *(Case(B, T, 131072) for T in (1, 5, 16) for B in (1, 8)),
    Case(1, 64, 4096),
    Case(8, 64, 4096),
    *(Case(B, 5, 4096, variant) for variant in VARIANTS if variant != "plain" for B in (1, 8, 32, 128)),
    *(Case(B, 5, 4096, **shape) for shape in OTHER_MODELS.values() for B in (1, 8, 32)),
    Case(8, 1, 4096, dtype="float32"),
    *(Case(B, 5, 128, capacity=131072) for B in (1, 32, 128)),
]


def options_of(case: Case, device: str) -> dict[str, Any]:
    """Return the options of a call."""
    options: dict[str, Any] = {"scale": case.size**-0.5, "capacity": case.capacity or case.context + case.T}
    options |= VARIANTS[case.variant]
    if "sinks" in options:
        options["sinks"] = torch.randn(case.heads, device=device)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = 0.5 ** torch.arange(1, case.heads + 1, device=device).float()
    if "ancestors" in options:
        mask = torch.eye(case.T, dtype=torch.bool, device=device)
        mask[:, 0] = True  # every token is a child of the first
        options["ancestors"] = ancestor_bits(mask.expand(case.B, -1, -1))
        options["positions"] = (case.context + (torch.arange(case.T, device=device) > 0)).repeat(case.B, 1)
    return options


def bytes_read(case: Case) -> float:
    """Return the bytes of the keys and values that a call needs."""
    keys = case.context + case.T
    if case.variant.startswith("window"):
        keys = min(keys, VARIANTS[case.variant]["window"] + case.T - 1)
    if case.variant.startswith("chunk"):
        keys -= case.context // VARIANTS[case.variant]["chunk"] * VARIANTS[case.variant]["chunk"]
    return case.B * keys * case.kv_heads * case.size * 2 * getattr(torch, case.dtype).itemsize


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor

    def pools(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pool of each call, as layers have them."""
        yield from zip(self.keys, self.values, strict=True)


def inputs(case: Case) -> Inputs:
    """Make random inputs: a pool for each call."""
    dtype, extent = getattr(torch, case.dtype), case.context + case.T
    calls = int(min(max(COLD // bytes_read(case), 2), MOST_CALLS))
    shape = calls, case.B * extent, case.kv_heads, case.size
    keys, values = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    query = torch.randn(case.B, case.T, case.heads, case.size, device="cuda", dtype=dtype)
    starts = torch.arange(case.B, device="cuda") * extent
    return Inputs(query, keys, values, starts, torch.full((case.B,), case.context, device="cuda"))


def ours(case: Case, given: Inputs) -> Callable[[], None]:
    """Return a function that makes all calls."""
    options = options_of(case, "cuda")

    def run() -> None:
        for keys, values in given.pools():
            decode_attention(given.query, keys, values, given.starts, given.lengths, **options)

    return run


def sdpa(case: Case, given: Inputs) -> Callable[[], None] | None:
    """Return the same calls by torch, query heads folded; only without variants. One token needs no mask."""
    if case.variant != "plain":
        return None
    extent, group = case.context + case.T, case.heads // case.kv_heads
    keys, values = (
        x.view(-1, case.B, extent, case.kv_heads, case.size).transpose(2, 3) for x in (given.keys, given.values)
    )
    query = given.query.unflatten(2, (case.kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    visible = torch.ones(case.T, extent, dtype=torch.bool, device="cuda").tril(case.context)
    mask = None if case.T == 1 else visible.repeat(group, 1).expand(case.B, 1, -1, -1)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, attn_mask=mask)

    def run() -> None:
        for n in range(len(keys)):
            attend(keys[n], values[n])

    return run


def measure(case: Case, *, beside: bool = True) -> dict[str, Any]:
    """Measure a case; `beside`: torch's time too."""
    given = inputs(case)
    line = {**asdict(case), "floor": round(bytes_read(case) / BANDWIDTH, 2)}
    line["time"] = round(median_of_replays(ours(case, given), len(given.keys)), 2)
    line["ratio"] = round(line["time"] / line["floor"], 2)
    if beside and (theirs := sdpa(case, given)) is not None:
        line["sdpa"] = round(median_of_replays(theirs, len(given.keys), 10), 1)
    return line


def plans(cases: list[Case]) -> Iterator[list[Step]]:
    """Yield the launches of every case, to be compiled."""
    names = ("window", "chunk", "softcap", "sinks", "alibi_slopes", "ancestors", "positions")
    for case in cases:
        options, dtype = options_of(case, "cuda"), getattr(torch, case.dtype)
        query = torch.empty(case.B, case.T, case.heads, case.size, dtype=dtype, device="cuda")
        pool = torch.empty(8192, case.kv_heads, case.size, dtype=dtype, device="cuda")
        numbers = torch.empty(case.B, dtype=torch.long, device="cuda")
        call = AttentionCall(
            query, pool, pool, numbers, numbers, None, options["scale"], options["capacity"],
            *(options.get(name) for name in names),
        )  # fmt: skip
        yield plan_attention(call, query, overlap=True)


def compile_part(part: int, parts: int) -> None:
    """Compile every `parts`-th of the different kernels of all cases, without launching them."""
    different = {
        (step.kernel.__name__, step.warps, str(step.arguments[0].traits)): (step, n > 0)
        for steps in plans(CASES)
        for n, step in enumerate(steps)
    }
    for name in sorted(different)[part::parts]:
        compile_step(different[name][0], overlap=different[name][1])


def markdown(lines: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    text = ["| variant | T | context | B | µs | read once | × | torch |", "|---|---|---|---|---|---|---|---|"]
    for line in lines:
        plain = Case(line["B"], line["T"], line["context"])
        shape = [f"{name} {line[name]}" for name in ("heads", "kv_heads", "size", "dtype", "capacity")
                 if line[name] != getattr(plain, name)]  # fmt: skip
        name = ", ".join(([line["variant"]] if line["variant"] != "plain" or not shape else []) + shape)
        cells = [name, *(line[key] for key in ("T", "context", "B", "time", "floor", "ratio")), line.get("sdpa", "")]
        text.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(text)


def check(rows: int = 1_200_000) -> dict[str, Any]:
    """Check all claims; the rows by several processes, which compile the many kernels side by side."""
    command = [sys.executable, __file__, "--rows", str(rows // PROCESSES)]
    parts = [subprocess.Popen([*command, str(1000 * n)], stdout=subprocess.PIPE, text=True) for n in range(PROCESSES)]
    outputs = [part.communicate()[0] for part in parts]
    if failed := [n for n, part in enumerate(parts) if part.returncode]:
        raise RuntimeError(f"parts {failed} of the rows failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "rows": sum(result["rows"] for result in results),
        "passes": sum(result["passes"] for result in results),
        "largest error over its bound": max(result["largest error over its bound"] for result in results),
        "long rows": attention_claims.long_rows(),
        "graph replay": attention_claims.graph_replay(),
        "determinism": attention_claims.determinism(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_gpu.json"))
    parser.add_argument("--markdown", action="store_true", help="print --out instead of measuring")
    parser.add_argument("--check", action="store_true", help="compare with the reference instead of measuring")
    parser.add_argument("--rows", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.markdown:
        return print(markdown(json.loads(options.out.read_text())["lines"]))
    if options.rows:
        return print(json.dumps(attention_claims.many_rows(*options.rows)))
    if options.check:
        made: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
        made["checks"] = check()
        print(made["checks"])
        options.out.write_text(json.dumps(made, indent=1) + "\n")
        return None
    if options.compile:
        return compile_part(*options.compile)
    side_by_side(__file__, PROCESSES)
    made = {
        "command": "python benchmarks/attention_gpu.py",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "unit": "microseconds a call; floor: its keys and values read once at 4.17 TB/s",
        "launch": launch_alone(),
        "lines": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        made["lines"].append(measure(case))
        print(made["lines"][-1], flush=True)
        options.out.write_text(json.dumps(made, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(markdown(made["lines"]))


if __name__ == "__main__":
    main()
