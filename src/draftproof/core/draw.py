"""Drawing a token: one scheme, fast on a CPU and on a GPU, so that the same noise gives the same token on both.

An inverse CDF in two steps over fixed chunks: the first number picks a chunk by the chunks' sums, the second a token
in it. Two numbers of 53 bits reach any tail; one of 24 would leave most of a large vocabulary out of reach. A kernel
that has the chunk sums from its pass over the logits needs to read one chunk more, not the row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core import host

CHUNK = 512
"""Tokens in a chunk. Part of the contract: another size would give other tokens for the same noise."""

FEW = 64
"""Rows on the host up to which each is looked into by itself."""

Row = npt.NDArray[Any]


def draw(weights: Float[Tensor, "B V"], first: Float[Tensor, " B"], second: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One token a row, with probability proportional to its weight; never one of weight 0."""
    if host.is_host(weights.device) and len(weights) <= FEW and weights.dtype in (torch.float32, torch.float64):
        numbers = first.tolist(), second.tolist()
        rows = zip(weights.numpy(), chunk_sums(weights).numpy(), *numbers, strict=True)
        return torch.tensor([pick(*row) for row in rows], dtype=torch.long)
    chunk = invert(chunk_sums(weights), first[:, None])
    return chunk[:, 0] * CHUNK + invert(chunk_weights(weights, chunk)[:, 0], second[:, None])[:, 0]


def pick(weights: Row, sums: Row, first: float, second: float) -> int:
    """One row's token; `sums` are those of its chunks. numpy's small operations cost a quarter of torch's."""
    chunk = _first_beyond(sums, first)
    return chunk * CHUNK + _first_beyond(weights[chunk * CHUNK : (chunk + 1) * CHUNK], second)


def _first_beyond(weights: Row, uniform: float) -> int:
    """Twin: `invert`."""
    running = weights.cumsum(dtype=np.float64)
    total = running[-1]
    return min(int(running.searchsorted(uniform * total, side="right")), int(np.count_nonzero(running < total)))


def chunk_sums(weights: Float[Tensor, "*B V"]) -> Float[Tensor, "*B C"]:
    """The sum of each chunk; the last may be short."""
    whole = weights.shape[-1] // CHUNK * CHUNK
    sums: Tensor = weights[..., :whole].unflatten(-1, (-1, CHUNK)).sum(-1)
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True)], -1)


def chunk_weights(weights: Float[Tensor, "B V"], chunks: Int[Tensor, "B N"]) -> Float[Tensor, "B N W"]:
    """The weights inside these chunks of each row, 0 behind the end of the vocabulary."""
    V = weights.shape[-1]
    tokens = chunks[..., None] * CHUNK + torch.arange(min(CHUNK, V), device=weights.device)
    inside = weights.gather(-1, tokens.clamp_max(V - 1).flatten(1)).view(tokens.shape)
    return inside if V % CHUNK == 0 else inside.masked_fill(tokens >= V, 0.0)


def invert(weights: Float[Tensor, "*B C"], uniform: Float[Tensor, "*B N"]) -> Int[Tensor, "*B N"]:
    """The inverse CDF: the first index whose running sum exceeds uniform · total.

    In float64 and scaled by the computed total. An index of weight 0 adds nothing to the running sum and is passed
    over; rounding may carry uniform · total up to the total itself, which means the last index of any weight.
    """
    running = weights.double().cumsum(-1)
    total = running[..., -1:]
    last = (running < total).sum(-1, keepdim=True)
    found = torch.searchsorted(running, uniform * total, right=True)
    return found.minimum(last)
