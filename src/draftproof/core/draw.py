"""Drawing a token: one scheme, fast on a CPU and on a GPU, so that the same noise gives the same token on both.

An inverse CDF in two steps over fixed chunks: the first number picks a chunk by the chunks' sums, the second a token
in it. Two numbers of 53 bits reach any tail; one of 24 would leave most of a large vocabulary out of reach. A kernel
that has the chunk sums from its pass over the logits needs to read one chunk more, not the row.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.rng import Philox, Purpose
from draftproof.core.types import PAD

CHUNK = 512
"""Tokens in a chunk. Part of the contract: another size would give other tokens for the same noise."""

ROW_BY_ROW = 64
"""Rows on the host up to which each is looked into by itself."""

Row = npt.NDArray[Any]


def draw(weights: Float[Tensor, "B V"], first: Float[Tensor, " B"], second: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One token a row, with probability proportional to its weight; never one of weight 0."""
    if is_cpu(weights.device) and len(weights) <= ROW_BY_ROW and weights.dtype in (torch.float32, torch.float64):
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


TRIALS: Final = 64
"""Trials of thinning before the residual is summed in full. Part of the contract: so is the lane behind them."""

AT_ONCE: Final = (0, 4, 16, 32, TRIALS)
"""Trials are made side by side, from one of these borders to the next. Which one stands does not depend on it."""


def close(weights: Float[Tensor, "N V"], rng: Philox, lane: int = 0) -> Int[Tensor, " N"]:
    """A draw in proportion to `weights` with the round's closing noise."""
    first, second = rng.pair(Purpose.CLOSE, torch.full((1,), lane, device=weights.device))
    return draw(weights, first[:, 0], second[:, 0])


def thin(
    p: Float[Tensor, "N V"],
    gain: Float[Tensor, " N"],
    q_of: Callable[[Int[Tensor, " M"], Int[Tensor, "M L"]], Float[Tensor, "M L"]],
    rng: Philox,
) -> Int[Tensor, " N"]:
    """A draw from norm(max(0, p − q)) that never looks at most of q; PAD where all trials failed.

    Draw x from p and let it stand with probability max(0, 1 − q(x)/p(x)); the first that stands has that distribution. A trial
    stands with probability TV(p, q), so trials fail together only where p and q nearly agree. The distribution is p · gain
    (`Distribution.weights_at`); `q_of(rows, tokens)` gives q of several tokens in some of the rows.
    """
    found = torch.full((len(p),), PAD, dtype=torch.long, device=p.device)
    rows = torch.arange(len(p), device=p.device)
    sums = chunk_sums(p)
    for start, stop in pairwise(AT_ONCE):
        first, second, coin = _numbers(rng, start, stop)
        chunk = invert(sums, first)
        inside = chunk_weights(p, chunk)
        offset = invert(inside, second[..., None])
        x, p_x = chunk * CHUNK + offset[..., 0], inside.gather(-1, offset)[..., 0] * gain[:, None]
        stands = coin * p_x < p_x - q_of(rows, x)
        standing = stands.any(-1)
        found[rows] = torch.where(standing, x.gather(-1, stands.int().argmax(-1, keepdim=True))[:, 0], PAD)
        if bool(standing.all()):
            break
        left = (~standing).nonzero()[:, 0]
        p, gain, sums, rng, rows = p[left], gain[left], sums[left], rng.take(left), rows[left]
    return found


def _numbers(rng: Philox, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers for the draw of each of these trials and a coin on whether it stands, had in one go."""
    n = stop - start
    both = rng.pairs(*_addresses(start, stop, rng.seeds.device))
    return both[0, :, :n], both[1, :, :n], both[0, :, n:]


@cache
def _addresses(start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sites and lanes: the draws' first, then the coins'."""
    lanes = torch.arange(start, stop, device=device)
    return torch.tensor([Purpose.CLOSE, Purpose.THIN], device=device).repeat_interleave(len(lanes)), lanes.repeat(2)


def race_weights(weights: Float[Tensor, "B V"], rng: Philox) -> Int[Tensor, " B"]:
    sums = chunk_sums(weights)
    chunks = torch.arange(sums.shape[-1], device=sums.device)
    chunk = (sums / rng.exponential(Purpose.POSITION, chunks, 0)).argmax(-1, keepdim=True)
    inside = chunk_weights(weights, chunk)[:, 0]
    tokens = chunk * CHUNK + torch.arange(inside.shape[-1], device=sums.device)
    first = (inside / rng.exponential(Purpose.POSITION, tokens, 1)).argmax(-1, keepdim=True)
    return tokens.gather(-1, first)[:, 0]
