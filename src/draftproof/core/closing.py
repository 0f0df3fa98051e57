"""Closing a round: the token that follows the kept ones, from the residual after a rejection, from p after none."""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.draw import CHUNK, chunk_sums, chunk_weights, draw, invert
from draftproof.core.noise import Noise, Site
from draftproof.core.types import PAD

TRIALS: Final = 64
"""Trials of thinning before the residual is summed in full. Part of the contract: so is the lane behind them."""

AT_ONCE: Final = 16
"""Trials made side by side. Which one stands does not depend on it."""


def close(weights: Float[Tensor, "N V"], noise: Noise, lane: int = 0) -> Int[Tensor, " N"]:
    """A draw in proportion to `weights` with the round's closing noise."""
    first, second = noise.pair(Site.CLOSE, torch.tensor([lane], device=weights.device))
    return draw(weights, first[:, 0], second[:, 0])


def thin(
    p: Float[Tensor, "N V"],
    q_of: Callable[[Int[Tensor, " M"], Int[Tensor, "M L"]], Float[Tensor, "M L"]],
    noise: Noise,
) -> Int[Tensor, " N"]:
    """A draw from norm(max(0, p − q)) that never looks at most of q; PAD where all trials failed.

    Draw x from p and let it stand with probability max(0, 1 − q(x)/p(x)); the first that stands has that law. A trial
    stands with probability TV(p, q), so trials fail together only where p and q nearly agree. `q_of(rows, tokens)`
    gives q of several tokens in some of the rows.
    """
    found = torch.full((len(p),), PAD, dtype=torch.long, device=p.device)
    rows = torch.arange(len(p), device=p.device)
    sums = chunk_sums(p)
    for start in range(0, TRIALS, AT_ONCE):
        lanes = torch.arange(start, start + AT_ONCE, device=p.device)
        x, p_x = _trials(p, sums, noise, lanes)
        stands = noise.uniform(Site.THIN, lanes) * p_x < p_x - q_of(rows, x)
        standing = stands.any(-1)
        first = x.gather(-1, stands.int().argmax(-1, keepdim=True))[:, 0]
        found[rows] = torch.where(standing, first, PAD)
        if bool(standing.all()):
            break
        left = (~standing).nonzero()[:, 0]
        p, sums, noise, rows = p[left], sums[left], noise.take(left), rows[left]
    return found


def _trials(
    p: Float[Tensor, "N V"], sums: Float[Tensor, "N C"], noise: Noise, lanes: Int[Tensor, " L"]
) -> tuple[Int[Tensor, "N L"], Float[Tensor, "N L"]]:
    """A draw from p for each lane, and p of what was drawn."""
    first, second = noise.pair(Site.CLOSE, lanes)
    chunk = invert(sums, first)
    inside = chunk_weights(p, chunk)
    offset = invert(inside, second[..., None])
    return chunk * CHUNK + offset[..., 0], inside.gather(-1, offset)[..., 0].double()
