"""Measure what is claimed of decode attention on a GPU, one function per claim. Needs no pytest."""

import random
import time
from typing import Any

import torch

from draftproof.kernels.attention import decode_attention
from kernels.attention_cases import Pass, excess, kernel, make, random_pass


def many_rows(rows: int = 1_000_000, seed: int = 0) -> dict[str, Any]:
    """Compare at least `rows` results (row, token, head) with the reference, over all variants, dtypes and sizes."""
    done, worst, passes, start = 0, 0.0, 0, time.time()
    while done < rows:
        choose = random.Random(seed + passes)
        T, most = choose.choice([1, 2, 5, 8, 16, 33, 64]), choose.choice([100, 700, 2000])
        B, size = min(256, 2048 // T, 150_000 // most), choose.choice([40, 64, 104, 128, 232])
        given = random_pass(seed + passes, most=most, rows=B, T=T, device="cuda", heads=24, size=size)
        found = excess(kernel(given), given, dtype=torch.float32)
        assert found <= 1, f"{found:.3g} times the error that rounding explains: seed {seed + passes}"
        done, worst, passes = done + B * T * 24, max(worst, found), passes + 1
    took = round(time.time() - start, 1)
    return {"rows": done, "passes": passes, "largest error over its bound": worst, "took": took}


def long_rows() -> dict[str, Any]:
    """Compare rows of up to 131072 tokens, and 256 rows, with the reference."""
    found = {}
    for name, lengths, T in (("long", [131072, 70000, 5], 5), ("many", [n * 7 for n in range(256)], 5)):
        given = make(lengths, T, heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda")
        found[name] = excess(kernel(given), given, dtype=torch.float32)
    assert max(found.values()) <= 1, found
    return found


def graph_replay() -> dict[str, Any]:
    """Record a graph at a length of 100 and replay it at 5000 and others: the results must be those of new calls."""
    given = make([5000, 4000], 5, heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda", widths=[5, 3])
    lengths = given.lengths.clone()
    given.lengths.fill_(100)
    kernel(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*given.tensors(), **given.options)
    found = {}
    for at in (lengths, torch.full_like(lengths, 100), lengths // 3):
        given.lengths.copy_(at)
        # the pass's tokens lie elsewhere then, among keys that are all there
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, kernel(given))
        found[str(at.tolist())] = excess(out, given, dtype=torch.float32)
    assert max(found.values()) <= 1, found
    return found


def determinism(repeats: int = 50) -> dict[str, Any]:
    """Repeat a call; run each row alone and in a larger batch: always the same bits."""
    lengths = [4000, 100, 2500, 0, 900, 1, 128, 3333]
    options = {"heads": 32, "kv_heads": 8, "size": 128, "dtype": torch.bfloat16, "device": "cuda"}
    given = make(lengths, 5, **options, variants=("tree", "alibi"))
    first = kernel(given)
    assert all(torch.equal(kernel(given), first) for _ in range(repeats))
    assert all(torch.equal(kernel(given.row(b))[0], first[b]) for b in range(len(lengths)))
    assert torch.equal(kernel(_repeated(given, 32))[-len(lengths) :], first)
    return {"repeats": repeats, "rows": len(lengths), "batches": [1, len(lengths), 32 * len(lengths)]}


def _repeated(given: Pass, times: int) -> Pass:
    """Return a batch with all rows several times; the rows only read the pool, so they may share it."""
    query, keys, values, starts, lengths, _ = given.tensors()
    options = {n: x.repeat(times, *[1] * (x.ndim - 1)) if n in ("ancestors", "positions") else x
               for n, x in given.options.items()}  # fmt: skip
    return Pass(query.repeat(times, 1, 1, 1), keys, values, starts.repeat(times), lengths.repeat(times), None, options)
