"""Draw tokens from weights: by inverse CDF, and by the race of `coupled`.

The same random numbers give the same token on a CPU and on a GPU. Both work in two steps over fixed chunks of the
vocabulary: the first picks a chunk by the chunks' sums, the second a token in it. Two numbers of 53 bits reach any
tail; one of 24 bits would leave most of a large vocabulary out of reach. A kernel that has the chunk sums from its pass
over the logits needs to read one more chunk, not the row.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.rng import Philox, Purpose

CHUNK = 512
"""Tokens in a chunk. Part of the contract: another size would give other tokens for the same random numbers."""

FEW_ROWS: Final = 64
"""Rows up to which a CPU handles each row by itself, whatever the vocabulary."""

LARGE_VOCABULARY: Final = 2048
"""Tokens from which a CPU handles each row by itself: below, many rows are faster in one batch."""

WHOLE_VECTORS: Final = 64
"""Numbers in a multiple of all vectors that a CPU computes with, loops unrolled."""

TRIALS: Final = 16
"""Trials before the residual is summed in full, on every device. Part of the contract, like the lane after them:
another number gives other tokens for the same seed. More trials cost a GPU more than a sum that many programs share."""

Row = npt.NDArray[Any]


def row_by_row(rows: int, V: int, device: torch.device) -> bool:
    """Return whether rows are handled one by one: on a CPU, unless there are many of a small vocabulary.

    Both ways round differently in the last bit. With the vocabulary of a real model a row's bits do not depend on how
    many rows there are.
    """
    return is_cpu(device) and (rows <= FEW_ROWS or V >= LARGE_VOCABULARY)


def exp2_by_row_(x: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Compute 2^x in place, so that a row's bits do not depend on the other rows.

    torch computes what is left over after whole vectors with another function, up to one bit apart. Where rows are not
    whole vectors, each is a call of its own, unless the vocabulary is small.
    """
    if x.shape[-1] % WHOLE_VECTORS == 0 or not row_by_row(FEW_ROWS + 1, x.shape[-1], x.device):
        return x.exp2_()
    for row in x:
        row.exp2_()
    return x


def draw(weights: Float[Tensor, "B V"], first: Float[Tensor, " B"], second: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Draw one token for each row, with probability proportional to its weight; never one of weight 0."""
    if row_by_row(len(weights), weights.shape[-1], weights.device) and weights.dtype in (torch.float32, torch.float64):
        numbers = first.tolist(), second.tolist()
        rows = zip(weights.numpy(), chunk_sums(weights).numpy(), *numbers, strict=True)
        return torch.tensor([pick(*row) for row in rows], dtype=torch.long)
    chunk = invert(chunk_sums(weights), first[:, None])
    return chunk[:, 0] * CHUNK + invert(chunk_weights(weights, chunk)[:, 0], second[:, None])[:, 0]


def close(weights: Float[Tensor, "N V"], rng: Philox, lane: int = 0) -> Int[Tensor, " N"]:
    """Draw the round's last token, residual or bonus, in proportion to `weights`."""
    first, second = rng.pair(Purpose.CLOSE, torch.full((1,), lane, device=weights.device))
    return draw(weights, first[:, 0], second[:, 0])


def race_weights(weights: Float[Tensor, "B V"], rng: Philox) -> Int[Tensor, " B"]:
    """Draw the token whose exponential clock, with its weight as rate, rings first at position `rng.starts`.

    The race draws in proportion to the weights, like `draw`. With the same random numbers, two similar distributions
    usually have the same winner, which is what `coupled` needs. First the chunks race with their sums, then the tokens
    of the winning chunk.
    """
    sums = chunk_sums(weights)
    chunks = torch.arange(sums.shape[-1], device=sums.device)
    chunk = (sums / rng.exponential(Purpose.POSITION, chunks, 0)).argmax(-1, keepdim=True)
    inside = chunk_weights(weights, chunk)[:, 0]
    tokens = chunk * CHUNK + torch.arange(inside.shape[-1], device=sums.device)
    first = (inside / rng.exponential(Purpose.POSITION, tokens, 1)).argmax(-1, keepdim=True)
    return tokens.gather(-1, first)[:, 0]


def chunk_sums(weights: Float[Tensor, "*B V"]) -> Float[Tensor, "*B C"]:
    """Sum the weights of each chunk; the last chunk may be short."""
    whole = weights.shape[-1] // CHUNK * CHUNK
    sums: Tensor = weights[..., :whole].unflatten(-1, (-1, CHUNK)).sum(-1)
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True)], -1)


def chunk_weights(weights: Float[Tensor, "B V"], chunks: Int[Tensor, "B N"]) -> Float[Tensor, "B N W"]:
    """Return the weights inside these chunks of each row, 0 after the end of the vocabulary."""
    V = weights.shape[-1]
    tokens = chunks[..., None] * CHUNK + torch.arange(min(CHUNK, V), device=weights.device)
    inside = weights.gather(-1, tokens.clamp_max(V - 1).flatten(1)).view(tokens.shape)
    return inside if V % CHUNK == 0 else inside.masked_fill(tokens >= V, 0.0)


def invert(weights: Float[Tensor, "*B C"], uniform: Float[Tensor, "*B N"]) -> Int[Tensor, "*B N"]:
    """Invert the CDF: return the first index whose running sum exceeds uniform · total.

    In float64, and scaled by the computed total. An index of weight 0 adds nothing to the running sum and is skipped.
    Rounding may raise uniform · total to the total itself; the result is then the last index of positive weight.
    """
    running = weights.double().cumsum(-1)
    total = running[..., -1:]
    last = (running < total).sum(-1, keepdim=True)
    found = torch.searchsorted(running, uniform * total, right=True)
    return found.minimum(last)


def pick(weights: Row, sums: Row, first: float, second: float) -> int:
    """Draw one row's token; `sums` are its chunk sums. Small operations cost a quarter as much in numpy as in torch.

    Reference: `draw`.
    """
    chunk = _invert_row(sums, first)
    return chunk * CHUNK + _invert_row(weights[chunk * CHUNK : (chunk + 1) * CHUNK], second)


def _invert_row(weights: Row, uniform: float) -> int:
    """Invert the CDF of one row. Reference: `invert`."""
    running = weights.cumsum(dtype=np.float64)
    total = running[-1]
    return min(int(running.searchsorted(uniform * total, side="right")), int(np.count_nonzero(running < total)))
