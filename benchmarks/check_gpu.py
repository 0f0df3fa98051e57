"""Equality of kernel and reference on a GPU, counted over many rows; the mismatches and how near to a tie they were."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_inputs import inputs

import draftproof as dp
from draftproof.kernels import Parameters, verify_rows

S = dp.Sampling
MIXED = [
    S(temperature=0.8), S(temperature=0.7, top_k=20, top_p=0.9), S(top_p=0.95), S(min_p=0.05), S(temperature=0.0),
    S(temperature=1.3, top_k=300), S(top_p=0.5, min_p=0.02), S(temperature=0.8, top_k=50),
]  # fmt: skip


def compare(
    B: int, K: int, V: int, dtype: torch.dtype, rule: str, samplings: list[dp.Sampling], seed: int, flat: bool = False
) -> dict[str, Any]:
    given = inputs(B, K, V, S(temperature=0.8), dtype=dtype, seed=seed, flat=flat)
    drafts = [S(temperature=0.8)] * B
    lengths = torch.randint(0, K + 1, (B,), device="cuda")
    parameters = Parameters.of(samplings, drafts, seeds=given.seeds, positions=given.positions, lengths=lengths)
    got = verify_rows(given.target, given.tokens, given.draft, parameters=parameters, rule=rule)
    want = dp.verify(
        given.target, given.tokens, given.draft, draft_lengths=lengths, sampling=samplings, draft_sampling=drafts,
        rule=rule, seeds=given.seeds, positions=given.positions,
    )  # fmt: skip
    same = (got.tokens == want.tokens).all(1)
    wrong = [
        {"sampling": str(samplings[b]), "got": got.tokens[b].tolist(), "want": want.tokens[b].tolist()}
        for b in (~same).nonzero()[:, 0].tolist()
    ]
    return {"rows": B, "differ": len(wrong), "faults": int((got.faults != 0).sum()), "which": wrong[:5],
            "accepted": got.accepted.float().mean().item()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check_gpu.json"))
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    lines, start = [], time.time()
    for V, B in ((128256, 16), (32000, 64), (2048, 1024)):
        for dtype in (torch.float32, torch.bfloat16):
            for rule in ("token", "block", "coupled"):
                each = [MIXED[b % len(MIXED)] for b in range(B)]
                line = {"V": V, "dtype": str(dtype), "rule": rule, **compare(B, 4, V, dtype, rule, each, len(lines))}
                lines.append(line)
                print(line, flush=True)
    n = 0
    while time.time() - start < options.seconds:
        sampling = MIXED[n % len(MIXED)]
        rule = ("token", "block", "coupled")[n // len(MIXED) % 3]
        line = {"V": 4096, "rule": rule, "sampling": str(sampling)}
        line |= compare(4096, 4, 4096, torch.float32, rule, [sampling] * 4096, 1000 + n)
        lines.append(line)
        n += 1
    rows, differ = sum(line["rows"] for line in lines), sum(line["differ"] for line in lines)
    for line in lines:
        if line["differ"]:
            print(line)
    print(f"{differ} of {rows} rows differ; {sum(line['faults'] for line in lines)} faults")
    options.out.write_text(json.dumps({"rows": rows, "differ": differ, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
