"""Make synthetic batches in the layouts of vLLM's two model runners, without vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftproof as dp
from draftproof.core import device as core_device
from draftproof.integrations.vllm.rows import Layout

V = 96
SAMPLINGS = [
    dp.SamplingParams(temperature=0.8),
    dp.SamplingParams(temperature=0),
    dp.SamplingParams(temperature=1.0, top_k=5),
    dp.SamplingParams(temperature=0.7, top_p=0.8),
    dp.SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
]


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Let Triton's interpreter run the kernels. References are computed outside of this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
        yield


@dataclass(frozen=True)
class Batch:
    """Ragged target rows [N, V], draft tokens and the distributions [M, V] they were drawn from."""

    layout: Layout
    rows: Tensor
    drafts: Tensor  # [B, K], -1 after the end
    draft_probs: Tensor
    samplings: list[dp.SamplingParams]

    @property
    def metadata(self) -> Any:
        """Return what `runner_v1` reads of vLLM's `SamplingMetadata`."""
        return sampling_metadata(self.samplings)


class MinPLogitsProcessor:
    """A stand-in under the name of vLLM's own."""

    def __init__(self, min_p: Tensor) -> None:
        self.min_p_device, self.min_p_count = min_p, int((min_p > 0).sum())


def sampling_metadata(samplings: list[dp.SamplingParams]) -> Any:
    column = {name: [getattr(s, name) for s in samplings] for name in ("temperature", "top_k", "top_p", "min_p")}
    min_p = MinPLogitsProcessor(torch.tensor(column["min_p"]))
    greedy = all(t == 0 for t in column["temperature"])
    return SimpleNamespace(
        temperature=None if greedy else torch.tensor(column["temperature"], dtype=torch.float32),
        all_greedy=greedy,
        top_k=torch.tensor([k or V for k in column["top_k"]]) if any(column["top_k"]) else None,
        top_p=torch.tensor(column["top_p"], dtype=torch.float32) if min(column["top_p"]) < 1 else None,
        generators={},
        no_penalties=True,
        bad_words_token_ids={},
        allowed_token_ids_mask=None,
        logitsprocs=SimpleNamespace(argmax_invariant=[min_p], non_argmax_invariant=[]),
        max_num_logprobs=None,
    )


def batch(samplings: list[dp.SamplingParams], drafted: list[int], seed: int = 0) -> Batch:
    """Make rows with a drafter near the target; greedy requests have argmax drafts, as in vLLM."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(tuple(drafted))
    rows = 2.0 * torch.randn(sum(drafted) + len(drafted), V, generator=generator)
    temperatures, probs, tokens = [s.temperature or 1.0 for s in samplings], [], []
    for b, (start, count) in enumerate(zip(layout.starts, layout.drafted, strict=True)):
        near = rows[start : start + count] + 0.5 * torch.randn(count, V, generator=generator)
        q = (near / temperatures[b]).softmax(-1)
        probs.append(q)
        drawn = q.multinomial(1, generator=generator)[:, 0] if count else torch.empty(0, dtype=torch.long)
        tokens.append(q.argmax(-1) if samplings[b].temperature == 0 else drawn)
    return Batch(layout, rows, layout.padded_tokens(torch.cat(tokens)), torch.cat(probs), samplings)
