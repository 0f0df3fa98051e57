"""Everything that is claimed of the kernels on a GPU, measured and written down; no pytest needed.

PYTHONPATH=src python benchmarks/check_gpu.py --out benchmarks/results/check_gpu.json
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

from kernels import claims


def judged(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a claim measured and whether it held."""
    start = time.time()
    try:
        result = {"held": True, **run()}
    except Exception:
        result = {"held": False, "error": traceback.format_exc()[-2000:]}
    return {**result, "took": round(time.time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check_gpu.json"))
    parser.add_argument("--seconds", type=float, default=120.0, help="for the million rows")
    parser.add_argument("--samples", type=int, default=4_000_000, help="for each test of the law")
    options = parser.parse_args()
    made: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "large shapes": claims.large_shapes,
        "graph replay": claims.graph_replay,
        "determinism": claims.determinism,
        "many rows": lambda: claims.many_rows(seconds=options.seconds),
    }
    for rule, name, sampling, drawn in claims.law_cases():

        def law(rule: str = rule, sampling: Any = sampling, drawn: bool = drawn) -> dict[str, Any]:
            result = claims.law(rule, sampling, drawn, options.samples)
            assert result["p"] > claims.ALPHA, result
            return result

        runs[f"law: {rule}, {name}"] = law
    for name, run in runs.items():
        made[name] = judged(run)
        print(name, made[name], flush=True)
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    sys.exit(0 if all(made[name]["held"] for name in runs) else 1)


if __name__ == "__main__":
    main()
