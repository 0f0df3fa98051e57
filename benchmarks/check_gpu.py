"""Check everything that is claimed of the kernels on a GPU, and write down what was measured. Needs no pytest.

    PYTHONPATH=src python benchmarks/check_gpu.py --out benchmarks/results/check_gpu.json

Takes two to four minutes: kernels are compiled first, by several processes side by side. Results are written as they
come; --only "many rows" measures one claim anew and leaves the others as --out has them.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import triton

import draftproof as dp
from gpu_compile import PROCESSES, collected, compile_part, counted, side_by_side
from kernels import claims, distribution_claims

WRONG = dp.SamplingParams(temperature=1.1)


def judged(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a claim; return what it measured and whether it held."""
    start = time.time()
    with counted() as missed:
        try:
            result = {"held": True, **run()}
        except Exception:
            result = {"held": False, "error": traceback.format_exc()[-2000:]}
    return {**result, "compiled": missed, "took": round(time.time() - start, 1)}


def compiled() -> dict[str, Any]:
    """Compile all kernels by several processes."""
    side_by_side(__file__, PROCESSES)
    return {"processes": PROCESSES}


def dists(samples: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a test of the distribution for every rule and setting, and one of a wrong distribution,
    which must fail."""

    def one(rule: str, sampling: dp.SamplingParams, drawn: bool) -> dict[str, Any]:
        result = distribution_claims.dist(rule, sampling, drawn, samples)
        assert result["p"] > distribution_claims.ALPHA, result
        return result

    def wrong() -> dict[str, Any]:
        result = distribution_claims.dist("token", distribution_claims.WARM, True, samples // 10, drawn_with=WRONG)
        assert result["p"] < distribution_claims.ALPHA, result
        return result

    cases = {
        f"distribution: {rule}, {name}": lambda rule=rule, sampling=sampling, drawn=drawn: one(rule, sampling, drawn)
        for rule, name, sampling, drawn in distribution_claims.distribution_cases()
    }
    return {**cases, "distribution: drafts of another distribution are found out": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check_gpu.json"))
    parser.add_argument("--seconds", type=float, default=55.0, help="for the million rows")
    parser.add_argument("--samples", type=int, default=4_000_000, help="for each test of the distribution")
    parser.add_argument("--only", nargs="+", help="claims by name, or by what their names begin with")
    parser.add_argument("--compile-only", action="store_true", help="check nothing; the tests ask for this")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile_only:
        return side_by_side(__file__, PROCESSES)
    if options.compile:
        with collected() as plans:
            claims.go_through()
        return compile_part(plans, *options.compile)
    made: dict[str, Any] = {
        **(json.loads(options.out.read_text()) if options.only and options.out.exists() else {}),
        "command": "python benchmarks/check_gpu.py",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "compiled": compiled,
        "large shapes": claims.large_shapes,
        "short lists": claims.short_lists,
        "graph replay": claims.graph_replay,
        "determinism": claims.determinism,
        **dists(options.samples),
        "many rows": lambda: claims.many_rows(seconds=options.seconds),
    }
    asked = tuple(options.only or [""])
    runs = {name: run for name, run in runs.items() if name.startswith(asked)}
    for name, run in runs.items():
        made[name] = judged(run)
        print(name, made[name], flush=True)
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    failed = [name for name in runs if not made[name]["held"]]
    print("all held" if not failed else f"FAILED: {failed}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
