"""Measure passes over rows of a hybrid target, and rows that come and go: in a KV pool and in a slot cache.

Both kinds of rows are timed in turns, and the smallest times are printed: other work on the machine only adds to them.

python benchmarks/hybrid_rows.py [--families lfm2 …] [--rows 8] [--context 1000] [--threads 1]
"""

import argparse
import time

import torch

from draftproof.models.hybrid import HybridModel
from draftproof.models.hybrid_rows import HybridRows, PooledHybridRows
from draftproof.models.rows import Block, Reading
from hybrids_cpu import V, model_of

WIDTH = 4
"""Tokens of each row in a pass, of which none is kept."""


def fill(rows: HybridRows, count: int, context: int) -> None:
    """Let rows read texts of about `context` tokens."""
    for row in range(count):
        rows.enter(row, context + count + WIDTH)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(V, (context + row,), generator=generator).tolist() for row in range(count)]
    rows.score([], reading=[Reading(row, text) for row, text in enumerate(texts)])


def pass_seconds(rows: HybridRows, count: int) -> float:
    block = Block(list(range(count)), torch.zeros((count, WIDTH), dtype=torch.long), [WIDTH] * count)
    start = time.perf_counter()
    rows.score([block])
    rows.keep(block.rows, [0] * count)
    return time.perf_counter() - start


def churn_seconds(rows: HybridRows, name: int) -> float:
    """Let an empty row enter and leave."""
    start = time.perf_counter()
    rows.enter(name, 1)
    rows.score([], reading=[Reading(name, [])])
    rows.leave(name)
    rows.score([])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=["lfm2"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for family in options.families:
        model = HybridModel(model_of(family))
        kinds = {"slot cache": HybridRows(model), "pool": PooledHybridRows(model, options.rows * 40)}
        passes: dict[str, list[float]] = {kind: [] for kind in kinds}
        churns: dict[str, list[float]] = {kind: [] for kind in kinds}
        for rows in kinds.values():
            fill(rows, options.rows, options.context)
        for repeat in range(options.repeats):
            for kind, rows in kinds.items():
                passes[kind].append(pass_seconds(rows, options.rows))
                churns[kind].append(churn_seconds(rows, options.rows + repeat))
        for kind in kinds:
            print(
                f"{family}, {kind}: a pass {1e3 * min(passes[kind]):.1f} ms, "
                f"a row that enters and leaves {1e3 * min(churns[kind]):.2f} ms"
            )


if __name__ == "__main__":
    main()
