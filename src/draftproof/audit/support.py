"""Which tokens can come at all, and where rounding makes that a matter of opinion.

Two correct computations of one law differ in their last bits. At a top-k, top-p or min-p cutoff that can let a token in
or keep it out. Where a cutoff lies that close to a token nothing is bet, which is settled by the law and before the
token; and no token is called impossible unless it stays so with every cutoff moved by the tolerance.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.audit.processors import cut, without
from draftproof.core.sampling import Sampling

Scores = Float[Tensor, "N V"]


def supported(scores: Scores, sampling: Sampling, tolerance: float) -> tuple[Scores, Bool[Tensor, " N"]]:
    """The scores with −inf where a token cannot come, and whether each row's cutoffs are clear of rounding."""
    clear = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    for name, others in (("top_k", ("top_p", "min_p")), ("top_p", ("top_k", "min_p")), ("min_p", ("top_k", "top_p"))):
        step = without(sampling, *others)
        if getattr(step, name) in (None, 1, 1.0, 0, 0.0):
            continue
        after = cut(scores, step)
        clear &= _clear(scores, after, step, tolerance)
        scores = after
    return scores, clear


def _clear(before: Scores, after: Scores, step: Sampling, tolerance: float) -> Bool[Tensor, " N"]:
    kept = after > -math.inf
    lowest = before.masked_fill(~kept, math.inf).amin(-1)
    highest = before.masked_fill(kept, -math.inf).amax(-1)  # of those cut off
    clear = lowest - highest > _margin(tolerance)
    if step.top_p < 1:
        probs = before.softmax(-1)
        mass = probs.masked_fill(~kept, 0.0).sum(-1)
        last = probs.masked_fill(~kept, 1.0).amin(-1)
        room = _mass_margin(step.top_p, tolerance)
        clear &= (mass - step.top_p > room) & (step.top_p - (mass - last) > room)
    if step.min_p > 0:
        edge = before.amax(-1) + math.log(step.min_p)
        clear &= (lowest - edge > _margin(tolerance)) & (edge - highest > _margin(tolerance))
    return clear


def reachable(scores: Scores, token: Int[Tensor, " N"], sampling: Sampling, tolerance: float) -> Bool[Tensor, " N"]:
    """Whether each token can come if every cutoff gives way by the tolerance."""
    margin = 2 * _margin(tolerance)
    own = scores.gather(1, token[:, None])[:, 0]
    possible = own > -math.inf
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        floor = scores.topk(sampling.top_k).values[:, -1] - margin
        possible &= own >= floor
        scores = scores.masked_fill(scores < floor[:, None], -math.inf)
    if sampling.top_p < 1:
        likelier = scores.softmax(-1).masked_fill(scores <= own[:, None] + margin, 0.0).sum(-1)
        possible &= likelier < sampling.top_p + 2 * _mass_margin(sampling.top_p, tolerance)
    if sampling.min_p > 0:
        possible &= own >= scores.amax(-1) + math.log(sampling.min_p) - margin
    return possible


def _mass_margin(top_p: int | float, tolerance: float) -> float:
    """By how much a nucleus' mass may be off: a set of mass m gains at most 2·δ·m·(1 − m) if its tokens are all too
    likely by a factor 1 + δ and the others too unlikely; and sums in float32 round."""
    return 2 * tolerance * top_p * (1 - top_p) + 1e-6


def _margin(tolerance: float) -> float:
    """Probabilities within a factor 1 ± tolerance: their scores within this of one another."""
    return 2 * math.log1p(tolerance)
