"""Measure how often a drafter's race has the target's winner: one flat race over V, or two heats (chunks, then tokens).

    python benchmarks/race_match.py

Rows as in verify_cpu.py (a Zipf-like head over a Gaussian bulk), drafter = target + N(0, s²). Both are sampled; the
standard error of each share is in the last column.
"""

import torch

from draftproof.core.draw import race_weights
from draftproof.core.rng import Philox


def flat_matches(p: torch.Tensor, q: torch.Tensor, races: int, generator: torch.Generator) -> int:
    """Count the races with equal winners, with one exponential clock for each token shared by both."""
    same = 0
    for _ in range(0, races, 50):
        clocks = torch.empty(50, len(p), dtype=torch.float64).exponential_(generator=generator)
        same += int(((p / clocks).argmax(-1) == (q / clocks).argmax(-1)).sum())
    return same


def main() -> None:
    V, races = 49152, 2_000
    print(f"{'s':>4} {'T':>4} {'overlap':>8} {'flat':>7} {'two heats':>10} {'±':>6}")
    for spread in (0.4, 0.8, 1.2):
        for temperature in (1.0, 0.7):
            overlap = flat = heats = 0.0
            rows = 4
            for seed in range(rows):
                g = torch.Generator().manual_seed(seed)
                x = torch.randn(V, generator=g)
                # ids are by frequency in real vocabularies: half of the head lies in the first chunks
                head = torch.cat(
                    [torch.randperm(2048, generator=g)[:200], torch.randperm(V, generator=g)[:200]]
                ).unique()
                x[head] += (9 - 1.1 * torch.arange(1, len(head) + 1).float().log())[
                    torch.randperm(len(head), generator=g)
                ]
                p = (x / temperature).softmax(-1)
                q = ((x + spread * torch.randn(V, generator=g)) / temperature).softmax(-1)
                overlap += float(p.minimum(q).sum()) / rows
                flat += flat_matches(p.double(), q.double(), races // rows, g) / races
                same = 0
                for start in range(0, races // rows, 50):
                    rng = Philox(torch.arange(50) + start + 10_000 * seed, torch.zeros(50, dtype=torch.long))
                    same += int((race_weights(p.expand(50, -1), rng) == race_weights(q.expand(50, -1), rng)).sum())
                heats += same / races
            error = (heats * (1 - heats) / races) ** 0.5
            print(f"{spread:>4} {temperature:>4} {overlap:8.3f} {flat:7.3f} {heats:10.3f} {error:6.3f}", flush=True)


if __name__ == "__main__":
    main()
