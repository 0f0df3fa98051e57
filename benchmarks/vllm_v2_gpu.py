"""Check and time the hook of vLLM's model runner V2 on a GPU, with synthetic batches in that runner's layout.

    PYTHONPATH=src python benchmarks/vllm_v2_gpu.py --out benchmarks/results/vllm_v2_gpu.json [--vllm FOLDER]

vLLM is not needed: the hook is a function on tensors. With --vllm, a folder that contains vLLM's package, its own
`rejection_sample` is timed on the same arguments; only the files of its kernels are loaded, so nothing that vLLM
requires must be installed. Beside it stands a plain PyTorch implementation of the token rule over padded rows. Every
batch is first compared with `draftproof.verify` on the CPU, request by request. Times are medians of eager calls
between CUDA events, in which contenders take turns.
"""

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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


def by_torch(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    num_speculative_steps: int,
    **_unused: Any,
) -> tuple[Tensor, Tensor]:
    """Verify by the token rule in plain PyTorch: rows padded to [B, K + 1, V], a softmax of all, a race for the token
    after the last accepted one."""
    K, states = num_speculative_steps, idx_mapping.long()
    first, J = cu_num_logits[:-1, None].long(), torch.arange(K + 1, device=target_logits.device)
    drafts = draft_tokens(draft_sampled, cu_num_logits, K)
    place = torch.minimum(first + J, cu_num_logits[1:, None].long() - 1)
    warm = temperature[states] > 0
    logits = target_logits[place]
    p = torch.where(warm[:, None, None], logits.softmax(-1), one_hot(logits.argmax(-1), logits.shape[-1]))
    q = one_hot(drafts.clamp_min(0), p.shape[-1])
    if draft_logits is not None:
        scale = torch.where(warm, temperature[states], 1.0)[:, None, None]
        q = torch.where(warm[:, None, None], (draft_logits[states] / scale).softmax(-1), q)
    there = drafts >= 0
    chances = [each.gather(-1, drafts.clamp_min(0)[..., None])[..., 0] for each in (p[:, :-1], q)]
    accept = there & (torch.rand_like(chances[0]) * chances[1] < chances[0])
    accepted = accept.long().cumprod(-1).sum(-1)
    ended = accepted == there.sum(-1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    row = p.gather(1, at)[:, 0]
    rejected = (row - q.gather(1, at.clamp_max(K - 1))[:, 0]).clamp_min(0)
    row = torch.where(ended[:, None], row, rejected)
    token = (row / torch.empty_like(row).exponential_()).argmax(-1)
    tokens = torch.cat([drafts, drafts[:, :1]], 1).scatter(1, accepted[:, None], token[:, None])
    return tokens, accepted.int() + 1


def draft_tokens(draft_sampled: Tensor, cu_num_logits: Tensor, K: int) -> Tensor:
    """Return the draft tokens of each request, -1 after the end of its draft."""
    place = cu_num_logits[:-1, None].long() + 1 + torch.arange(K, device=draft_sampled.device)
    tokens = draft_sampled[place.clamp_max(len(draft_sampled) - 1)].long()
    return tokens.masked_fill(place >= cu_num_logits[1:, None], -1)


def one_hot(tokens: Tensor, V: int) -> Tensor:
    return torch.zeros(*tokens.shape, V, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)


def microseconds(calls: Mapping[str, Callable[[], Any]], repeats: int = 50) -> dict[str, float]:
    """Return each call's median time; calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 5):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            end.synchronize()
            if i >= 5:  # the first calls compile and allocate
                times[name].append(1e3 * begin.elapsed_time(end))
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


PACKAGES = ("v1", "v1.worker", "v1.worker.gpu", "v1.worker.gpu.sample", "v1.worker.gpu.spec_decode")
WATERMARKING = ("v1.watermarking", "v1.watermarking.prfs")


def stock(folder: Path | None) -> Callable[..., Any] | None:
    """Load vLLM's own function from its files, without running any `__init__.py` of the package."""
    if folder is None:
        return None
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    for name in ("", *PACKAGES, *WATERMARKING):
        package = ModuleType(f"vllm.{name}".rstrip("."))
        package.__path__ = [str(folder.joinpath("vllm", *name.split(".")))]
        sys.modules[package.__name__] = package
    utilities: Any = ModuleType("vllm.triton_utils")
    utilities.triton, utilities.tl, utilities.tldevice, utilities.HAS_TRITON = triton, tl, libdevice, True
    sys.modules["vllm.triton_utils"] = utilities
    function: Callable[..., Any] = import_module(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
    ).rejection_sample
    first = tuple(inspect.signature(function).parameters)[: len(PARAMETERS)]
    assert first == PARAMETERS, f"vLLM's parameters are {first}"
    return function


def contenders(given: dict[str, Any], theirs: Callable[..., Any] | None) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "draftproof": lambda: sample("block", **given),
        "torch": lambda: by_torch(**given),
    }
    if theirs is not None:
        calls["vllm"] = lambda: theirs(*given.values())
    return calls


def unlike_torch(given: dict[str, Any]) -> int:
    """Count greedy requests whose tokens are not those of the plain PyTorch implementation."""
    ours, plain = sample("block", **given), by_torch(**given)
    within = torch.arange(ours[0].shape[1], device=ours[0].device) < ours[1][:, None]
    return int(((ours[1] != plain[1]) | ((ours[0] != plain[0]) & within).any(-1)).sum())


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
                if kind == "greedy":
                    row["differing_from_torch"] = unlike_torch(given)
                row["microseconds"] = microseconds(contenders(given, theirs))
                rows.append(row)
                print(row, flush=True)
                torch.cuda.empty_cache()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    wrong = [row for row in rows if row["differing"] or row.get("differing_from_torch")]
    assert not wrong, f"verdicts differ from draftproof.verify or plain PyTorch: {wrong}"


if __name__ == "__main__":
    main()
