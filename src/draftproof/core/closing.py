"""Closing a round: the token that follows the kept ones, from the residual after a rejection, from p after none."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.draw import CHUNK, chunk_sums, chunk_weights, draw, invert
from draftproof.core.noise import Noise, Site
from draftproof.core.types import PAD

TRIALS: Final = 64
"""Trials of thinning before the residual is summed in full. Part of the contract: so is the lane behind them."""

AT_ONCE: Final = (0, 4, 16, 32, TRIALS)
"""Trials are made side by side, from one of these borders to the next. Which one stands does not depend on it."""


def close(weights: Float[Tensor, "N V"], noise: Noise, lane: int = 0) -> Int[Tensor, " N"]:
    """A draw in proportion to `weights` with the round's closing noise."""
    first, second = noise.pair(Site.CLOSE, torch.full((1,), lane, device=weights.device))
    return draw(weights, first[:, 0], second[:, 0])


def thin(
    p: Float[Tensor, "N V"],
    gain: Float[Tensor, " N"],
    q_of: Callable[[Int[Tensor, " M"], Int[Tensor, "M L"]], Float[Tensor, "M L"]],
    noise: Noise,
) -> Int[Tensor, " N"]:
    """A draw from norm(max(0, p − q)) that never looks at most of q; PAD where all trials failed.

    Draw x from p and let it stand with probability max(0, 1 − q(x)/p(x)); the first that stands has that law. A trial
    stands with probability TV(p, q), so trials fail together only where p and q nearly agree. The law is p · gain
    (`Law.weights_at`); `q_of(rows, tokens)` gives q of several tokens in some of the rows.
    """
    found = torch.full((len(p),), PAD, dtype=torch.long, device=p.device)
    rows = torch.arange(len(p), device=p.device)
    sums = chunk_sums(p)
    for start, stop in pairwise(AT_ONCE):
        first, second, coin = _numbers(noise, start, stop)
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
        p, gain, sums, noise, rows = p[left], gain[left], sums[left], noise.take(left), rows[left]
    return found


def _numbers(noise: Noise, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers for the draw of each of these trials and a coin on whether it stands, had in one go."""
    n = stop - start
    both = noise.pairs(*_addresses(start, stop, noise.seeds.device))
    return both[0, :, :n], both[1, :, :n], both[0, :, n:]


@cache
def _addresses(start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sites and lanes: the draws' first, then the coins'."""
    lanes = torch.arange(start, stop, device=device)
    return torch.tensor([Site.CLOSE, Site.THIN], device=device).repeat_interleave(len(lanes)), lanes.repeat(2)
