"""Make the rows of the GPU benchmark: a Zipf-like head over a Gaussian bulk; drafter = target + Gaussian noise.

The height of the head varies by row, so that a batch holds sharp rows and flat ones: at V = 128256 and temperature 0.8
the nucleus of 0.95 has a few dozen tokens in most rows and thousands in one of two hundred.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import draftproof as dp

HEAD = 1000
DRAFT_NOISE = 0.8


@dataclass(frozen=True)
class Inputs:
    """One batch of requests, as tensors."""

    target: Tensor
    draft: Tensor
    tokens: Tensor
    seeds: Tensor
    positions: Tensor
    lengths: Tensor


def rows(N: int, V: int, generator: torch.Generator, *, flat: bool = False) -> Tensor:
    """Make N rows of logits, float32."""
    device = generator.device
    logits = torch.randn(N, V, generator=generator, device=device)
    if flat:
        return logits
    height = 15.0 + 1.2 * torch.randn(N, 1, generator=generator, device=device)
    n = min(HEAD, V // 2)
    rank = torch.arange(1, n + 1, device=device).log()
    where = torch.rand(N, V, generator=generator, device=device).topk(n).indices
    jitter = 0.3 * torch.randn(N, n, generator=generator, device=device)
    return logits.scatter_(1, where, height - 1.3 * rank + jitter)


def inputs(
    B: int,
    K: int,
    V: int,
    draft_sampling: dp.SamplingParams,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cuda",
    seed: int = 0,
    flat: bool = False,
    noise: float = DRAFT_NOISE,
) -> Inputs:
    """Make a batch of requests. `noise`: standard deviation of the draft's logits around the target's."""
    generator = torch.Generator(device).manual_seed(seed)
    target = rows(B * (K + 1), V, generator, flat=flat).view(B, K + 1, V)
    difference = torch.randn(B, K, V, generator=generator, device=device)
    draft = (target[:, :K] + noise * difference).to(dtype)
    numbers = torch.randint(2**40, (2, B), generator=generator, device=device)
    lengths = torch.full((B,), K, device=device)
    tokens = drawn(draft, draft_sampling, seed)
    return Inputs(target.to(dtype), draft, tokens, numbers[0], numbers[1] % 4096, lengths)


def drawn(draft: Tensor, sampling: dp.SamplingParams, seed: int = 0) -> Tensor:
    """Draw a token from each row of draft logits [B, K, V]."""
    B, K, _ = draft.shape
    generator = torch.Generator(draft.device).manual_seed(seed + 1)
    tokens = torch.empty((B, K), dtype=torch.long, device=draft.device)
    for b in range(0, B, 16):  # in parts: dense probabilities of a large batch are large
        dist = dp.warp(draft[b : b + 16], [sampling] * len(draft[b : b + 16])).probs()
        tokens[b : b + 16] = dist.flatten(0, 1).multinomial(1, generator=generator).view(-1, K)
    return tokens
