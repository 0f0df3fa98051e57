"""Check and measure the engine on a GPU: greedy equality, syncs, distributions, speed, memory. Needs no dev tools.

    PYTHONPATH=src python3 benchmarks/engine_gpu.py --out benchmarks/results/engine_gpu.json

Weights are random, so no model hub is needed. The most important parts come first, each with a share of the time. A
part that fails is recorded with the end of its traceback, and the next one runs. Results are written to the file as
they come. `--device cpu --tiny` runs everything in a minute, to see that it runs.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from engine_checks import Found, dists, greedy
from engine_models import Scale
from engine_speed import launches, memory, speed
from engine_syncs import filtered, trees, waits

ALPHA: Final = 1e-6
NEAR: Final = 1e-4
"""Difference of logits below which rounding may swap two tokens."""

PARTS: Final[dict[str, tuple[str, Callable[[Scale], Found], float]]] = {
    "greedy": ("greedy rows that part from transformers", greedy, 50),
    "waits": ("waits in a round", waits, 45),
    "trees": ("waits in a round of trees", trees, 45),
    "speed": ("speed of a 1B shape, one row", speed, 70),
    "distributions": ("p-values of the joint distribution of three tokens", dists, 50),
    "launches": ("calls of the CUDA runtime in a round", launches, 20),
    "memory": ("memory of eight rows", memory, 15),
    "filtered": ("waits in a round with filters", filtered, 60),
}
"""Each part's title in the file, its function and its limit in seconds: a check under way at the limit is finished, and
no other check of the part is started."""


def run(part: Callable[[Scale], Found], scale: Scale, seconds: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run one part until it ends, fails or exceeds its time."""
    start, found = time.perf_counter(), {}
    try:
        for name, value in part(scale):
            found[name] = value
            keep(found)
            print(f"  {time.perf_counter() - start:6.1f} s  {name}: {value}", flush=True)
            if time.perf_counter() - start > seconds:
                found["cut short"] = f"after {seconds:.0f} seconds"
                break
    except Exception as error:
        traceback.print_exc()
        lines = traceback.format_exception(error)
        found["failed"] = "".join(lines)[-1500:]
    found["seconds"] = round(time.perf_counter() - start, 1)
    keep(found)


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """List what is wrong; if all lists are empty, nothing is."""
    parted, p_values, rounds, of_trees = (
        result.get(PARTS[name][0], {}) for name in ("greedy", "distributions", "waits", "trees")
    )
    controls = [name for name, p in p_values.items() if "control" in name and p > ALPHA]
    controls += [name for name, lines in rounds.items() if "control" in name and not lines]
    found = {**rounds, **{f"tree: {name}": r for name, r in of_trees.items()}}
    waiting = {name: r for name, r in found.items() if isinstance(r, dict) and "rounds" in r}
    return {
        "failed": [title for title, found in result.items() if isinstance(found, dict) and "failed" in found],
        "parted where no two tokens were near": [
            name for name, r in parted.items() if isinstance(r, dict) and any(m > NEAR for m in r["margins"])
        ],
        "biased": [
            name for name, p in p_values.items() if isinstance(p, float) and "control" not in name and p < ALPHA
        ],
        "controls that found nothing": controls,
        "waited more than once": [
            name
            for name, r in waiting.items()
            if r["fetches waited for, at most"] > 1 or r["other waits in a round, at most"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can handle")
    parser.add_argument("--seconds", type=float, default=230, help="no part is started later than this")
    options = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {
        "command": "PYTHONPATH=src python3 benchmarks/engine_gpu.py",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }

    def keep(title: str, found: dict[str, Any]) -> None:
        result[title] = found
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    for name in options.only:
        title, part, seconds = PARTS[name]
        left = options.seconds - (time.perf_counter() - start)
        print(f"{title} ({left:.0f} s left)", flush=True)
        if left > 0:
            scale = Scale(options.device, options.tiny)
            run(part, scale, min(seconds, left), lambda found, title=title: keep(title, found))  # type: ignore[misc]
    keep("seconds", {"all": round(time.perf_counter() - start, 1)})
    keep("verdict", verdict(result))
    print(json.dumps(result["verdict"], indent=1))


if __name__ == "__main__":
    main()
