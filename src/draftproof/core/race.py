"""A race for a token: the winner is a function of the noise and the law alone, and near laws have the same winner.

Every token has an exponential clock that runs at the speed of its probability; the first to ring wins, with exactly
its probability (Gumbel's trick). A drafter that runs the same race over its own law picks the same token as the
target wherever their laws are close (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The race is run in two heats,
among the chunks and then inside the winning chunk: the law is the same, and V / 512 + 512 clocks do for a vocabulary
of V.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.draw import CHUNK, chunk_sums, chunk_weights
from draftproof.core.law import Law
from draftproof.core.noise import Noise, Site


def race(law: Law, noise: Noise) -> Int[Tensor, " B"]:
    """The token that wins at each row's absolute position, `noise.starts`."""
    return run(law.probs(), noise)


def propose(law: Law, noise: Noise, j: int) -> Int[Tensor, " B"]:
    """A drafter's j-th token in each row: its own draw, or under `coupled` its own run of the target's race."""
    return race(law, noise.shifted(j)) if noise.shared else law.draw(noise, Site.DRAFT, j)


def run(weights: Float[Tensor, "B V"], noise: Noise) -> Int[Tensor, " B"]:
    sums = chunk_sums(weights)
    chunks = torch.arange(sums.shape[-1], device=sums.device)
    chunk = (sums / noise.exponential(Site.POSITION, chunks, 0)).argmax(-1, keepdim=True)
    inside = chunk_weights(weights, chunk)[:, 0]
    tokens = chunk * CHUNK + torch.arange(inside.shape[-1], device=sums.device)
    first = (inside / noise.exponential(Site.POSITION, tokens, 1)).argmax(-1, keepdim=True)
    return tokens.gather(-1, first)[:, 0]
