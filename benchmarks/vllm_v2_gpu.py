"""Check and time the hook of vLLM's model runner V2 on a GPU, with synthetic batches in that runner's layout.

    PYTHONPATH=src python benchmarks/vllm_v2_gpu.py --out benchmarks/results/vllm_v2_gpu.json [--vllm FOLDER]

vLLM is not needed: the hook is a function on tensors. With --vllm, a folder that contains vLLM's package, its own
`rejection_sample` is timed on the same arguments, if it can be imported there. Every batch is first compared with
`draftproof.verify` on the CPU, request by request. Times are medians of eager calls between CUDA events.
"""

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import draftproof as dp
from draftproof.integrations.vllm.runner_v2 import PARAMETERS, sample

V = 128_256
BATCHES = (1, 8, 64, 256)
COMPARED = 32
"""Requests of a batch that are compared with the reference, which is slow."""


def batch(B: int, K: int, V: int, device: str, *, drawn: bool, greedy: bool, seed: int = 0) -> dict[str, Any]:
    """Return arguments of `rejection_sample`: requests with 0 to K draft tokens, states in another order than rows."""
    generator = torch.Generator(device=device).manual_seed(seed)
    drafted = torch.randint(K + 1, (B,), generator=generator, device=device).clamp_min(int(B == 1) * K)
    ends = (drafted + 1).cumsum(0)
    N = int(ends[-1])
    owners = torch.arange(B, device=device).repeat_interleave(drafted + 1, output_size=N)
    starts = torch.nn.functional.pad(ends, (1, 0))
    local = torch.arange(N, device=device) - starts[owners]
    states = torch.randperm(B, generator=generator, device=device)
    temperature = torch.zeros(B, device=device)
    if not greedy:
        temperature = 0.6 + 0.8 * torch.rand(B, generator=generator, device=device)
    logits = 3.0 * torch.randn(N, V, generator=generator, device=device)
    draft_logits = torch.zeros(B, K, V, device=device)
    before = local < drafted[owners]
    near = logits[before] + torch.randn(int(before.sum()), V, generator=generator, device=device)
    draft_logits[states[owners[before]], local[before]] = near
    scale = torch.where(temperature == 0, 1.0, temperature)[states][owners]
    noise = torch.rand(near.shape, generator=generator, device=device).clamp_min(1e-20).log().neg().log().neg()
    tokens = near.argmax(-1) if greedy else (near / scale[before][:, None] + noise).argmax(-1)
    draft_sampled = torch.zeros(N, dtype=torch.int64, device=device)
    draft_sampled[before.nonzero()[:, 0] + 1] = tokens
    return {
        "target_logits": logits / scale[:, None],
        "draft_logits": draft_logits if drawn else None,
        "draft_sampled": draft_sampled,
        "cu_num_logits": starts.int(),
        "pos": local + 100,
        "idx_mapping": states.int(),
        "expanded_idx_mapping": states[owners].int(),
        "expanded_local_pos": local.int(),
        "temperature": temperature,
        "seed": torch.arange(B, device=device) + 7,
        "num_speculative_steps": K,
    }


def differing(arguments: dict[str, Any], rule: str) -> int:
    """Count requests whose tokens are not those of `draftproof.verify` on the CPU."""
    tokens, counts = (each.cpu() for each in sample(rule, **arguments))
    given = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}
    drawn = given["draft_logits"] is not None
    wrong = 0
    for b, state in enumerate(given["idx_mapping"][:COMPARED].tolist()):
        start, stop = given["cu_num_logits"][b : b + 2].tolist()
        T = float(given["temperature"][state])
        q = given["draft_logits"][None, state, : stop - start - 1] / T if drawn and T and stop - start > 1 else None
        verdict = dp.verify(
            given["target_logits"][None, start:stop],
            given["draft_sampled"][None, start + 1 : stop],
            q,
            sampling=dp.SamplingParams(temperature=float(T > 0)),
            draft_sampling=dp.SamplingParams(),
            rule="token" if drawn else rule,
            seeds=given["seed"][state : state + 1],
            positions=101,
        )
        emitted = verdict.tokens[0, : int(verdict.accepted) + 1].tolist()
        wrong += emitted != tokens[b, : int(counts[b])].tolist()
    return wrong


def microseconds(call: Callable[[], Any], repeats: int = 50) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return round(statistics.median(times), 1)


def stock(folder: Path | None) -> Callable[..., Any] | None:
    """Return vLLM's own function, or None where it cannot be imported."""
    if folder is None:
        return None
    sys.path.append(str(folder))
    try:
        function = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils").rejection_sample
    except ImportError as error:
        print(f"vLLM's function cannot be imported here: {error}")
        return None
    first = tuple(inspect.signature(function).parameters)[: len(PARAMETERS)]
    assert first == PARAMETERS, f"vLLM's parameters are {first}"
    made: Callable[..., Any] = function
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vllm", type=Path, help="a folder that contains vLLM's package")
    options = parser.parse_args()
    theirs, rows = stock(options.vllm), []
    for K in (4, 8):
        for B in BATCHES:
            for kind in ("chosen", "drawn", "greedy"):
                given = batch(B, K, V, "cuda", drawn=kind == "drawn", greedy=kind == "greedy")
                row = {"B": B, "K": K, "V": V, "drafts": kind, "rows": len(given["target_logits"])}
                row |= {"compared": min(B, COMPARED), "differing": differing(given, "block")}
                row["microseconds"] = microseconds(lambda given=given: sample("block", **given))
                if theirs is not None:
                    row["vllm_microseconds"] = microseconds(lambda given=given: theirs(*given.values()))
                rows.append(row)
                print(row, flush=True)
                torch.cuda.empty_cache()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    assert not any(row["differing"] for row in rows), "some verdicts are not those of draftproof.verify"


if __name__ == "__main__":
    main()
