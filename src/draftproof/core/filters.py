"""Turn temperature, top-k, top-p and min-p into a distribution's row numbers: scale, cutoff, log-sum-exp, point.

On a CPU, values are read to choose the shortest way; on a GPU each read is a sync, so all rows take the general way.
"""

import math
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.distribution import log_sum_exp
from draftproof.core.types import PAD

WIDTHS = (64, 1024)
"""Numbers of largest logits that are sorted, one after the other, to find the nucleus before the whole row is sorted:
most nuclei are small."""

FOLDS: Final = 32
"""Logits in a column of the folded row: `largest` compares the columns' maxima and searches only the best columns."""

FOLD_BELOW: Final = 8
"""Folding pays if at most one in this many columns has to be searched."""

COARSE: Final = 80.0
"""Rounding of scale · logit above which a row becomes its limit, a point mass: the next smaller logit that its dtype
can hold is less than e⁻⁴⁰ as likely then, and exponents of 2 would overflow soon."""

RowStats = tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"], Int[Tensor, " N"]]
Cutoffs = tuple[Float[Tensor, " N"], Float[Tensor, " N"]]


def filter_stats(
    logits: Float[Tensor, "N R"], temperature: int | float, top_k: int | None, top_p: int | float, min_p: int | float
) -> RowStats:
    """Return scale, cutoff, log-sum-exp and point of each row; log-sum-exp is NaN if a row is not a distribution."""
    peak = logits.amax(-1)
    sound = torch.isfinite(peak)  # the peak is NaN or +inf if any logit is, and −inf if no token is allowed
    scale = 1.0 / (temperature or 1.0)
    scales = torch.full_like(peak, scale, dtype=torch.float64)
    if temperature == 0:
        lse = torch.where(sound, 0.0, math.nan).double()
        return scales, torch.full_like(peak, -math.inf), lse, argmax(logits)
    cutoff, lse = _cut(logits, scale, peak, top_k, top_p, min_p)
    point = torch.full_like(peak, PAD, dtype=torch.long)
    # a log-sum-exp that overflowed is not one: NaN says so, where +inf would be taken for a distribution
    lse = torch.where(sound & torch.isfinite(lse), lse, math.nan)
    if is_cpu(logits.device):
        coarse = sound & (peak.abs().double() * (scale * torch.finfo(peak.dtype).eps) > COARSE)
        if bool(coarse.any()):
            point[coarse], lse[coarse] = argmax(logits[coarse]), 0.0
    return scales, cutoff, lse, point


def _cut(
    logits: Float[Tensor, "N R"],
    scale: float,
    peak: Float[Tensor, " N"],
    top_k: int | None,
    top_p: int | float,
    min_p: int | float,
) -> Cutoffs:
    """Return cutoff and log-sum-exp of each row for temperatures above 0."""
    R = logits.shape[-1]
    floor = (peak.double() + math.log(min_p) / scale).to(peak.dtype) if min_p > 0 else peak - math.inf
    if top_k is not None and top_k < R:
        values = largest(logits, top_k + 1)
        return _cut_sorted(values[:, :top_k], _ties(logits, values), scale, top_p, floor)
    if top_p == 1:
        return floor, log_sum_exp(logits, scale, peak, floor if min_p > 0 else None)
    return _nucleus(logits, scale, log_sum_exp(logits, scale, peak) - scale * peak.double(), top_p, floor)


def _ties(logits: Float[Tensor, "N R"], values: Float[Tensor, "N K"]) -> Int[Tensor, " N"]:
    """Count the logits beyond the k largest that equal the k-th; `values` are the k + 1 largest."""
    kth = values[:, -2]
    if not is_cpu(values.device):  # testing whether there are any would be a sync
        return (logits >= kth[:, None]).sum(-1) - (values.shape[-1] - 1)
    extra = torch.zeros(len(values), dtype=torch.long, device=values.device)
    tied = (kth == values[:, -1]).nonzero()[:, 0]
    if len(tied):
        extra[tied] = (logits[tied] >= kth[tied, None]).sum(-1) - (values.shape[-1] - 1)
    return extra


def _cut_sorted(
    values: Float[Tensor, "N K"],
    ties: Int[Tensor, " N"],
    scale: float,
    top_p: int | float,
    floor: Float[Tensor, " N"],
) -> Cutoffs:
    """Return cutoff and log-sum-exp of rows that consist of `values`, descending, and `ties` copies of the last one."""
    weights = ((values - values[:, :1]).double() * scale).exp()
    beyond = ties * weights[:, -1]
    total = weights.sum(-1) + beyond
    edge = values[:, -1] if top_p == 1 else _edge(values, weights, top_p * total)
    cutoff = edge.maximum(floor)
    mass = weights.masked_fill(values < cutoff[:, None], 0.0).sum(-1)
    mass = mass + beyond.masked_fill(values[:, -1] < cutoff, 0.0)
    return cutoff, scale * values[:, 0].double() + mass.log()


def _edge(
    values: Float[Tensor, "N K"], weights: Float[Tensor, "N K"], wanted: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return the smallest value kept by top-p: the last one whose preceding cumulative mass is below `wanted`.

    `values` are descending; the first is always kept.
    """
    kept = weights.cumsum(-1) - weights < wanted[:, None]
    return values.gather(-1, kept.sum(-1, keepdim=True).clamp_min(1) - 1)[:, 0]


def _nucleus(
    logits: Float[Tensor, "N R"],
    scale: float,
    log_total: Float[Tensor, " N"],
    top_p: int | float,
    floor: Float[Tensor, " N"],
) -> Cutoffs:
    """Return cutoff and log-sum-exp of top-p over whole rows; `log_total` is the log-sum-exp relative to the peak."""
    wanted = top_p * log_total.exp()
    if not is_cpu(logits.device):  # testing whether a few logits suffice would be a sync, so all are sorted
        _, cutoff, lse = _nucleus_among(logits.sort(descending=True).values, scale, wanted, floor)
        return cutoff, lse
    R = logits.shape[-1]
    cutoff, lse = torch.empty_like(floor), torch.empty_like(log_total)
    left = torch.arange(len(logits), device=logits.device)
    for width in (*(w for w in WIDTHS if w < R), R):
        values = largest(logits[left], width)
        edge, cutoff_left, lse_left = _nucleus_among(values, scale, wanted[left], floor[left])
        found = (values[:, -1] < edge) | (width == R)  # `values` then contain all logits equal to the edge
        cutoff[left[found]], lse[left[found]] = cutoff_left[found], lse_left[found]
        left = left[~found]
        if not len(left):
            break
    return cutoff, lse


def _nucleus_among(
    values: Float[Tensor, "N K"], scale: float, wanted: Float[Tensor, " N"], floor: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the nucleus edge, cutoff and log-sum-exp, valid if the edge is among these descending values."""
    weights = ((values - values[:, :1]).double() * scale).exp()
    edge = _edge(values, weights, wanted)
    cutoff = edge.maximum(floor)
    mass = weights.masked_fill(values < cutoff[:, None], 0.0).sum(-1)
    return edge, cutoff, scale * values[:, 0].double() + mass.log()


def largest(logits: Float[Tensor, "N R"], k: int) -> Float[Tensor, "N K"]:
    """Return the k largest logits of each row, descending.

    Rows are folded to columns of FOLDS logits. The k columns with the largest maxima hold the k largest logits: any
    logit of another column is at most as large as each of those k maxima.
    """
    columns = logits.shape[-1] // FOLDS
    if not is_cpu(logits.device) or FOLD_BELOW * k > columns:
        return logits.topk(k).values
    folded = logits[:, : FOLDS * columns].unflatten(-1, (FOLDS, columns))
    best = folded.amax(1).topk(k, sorted=False).indices
    candidates = folded.gather(2, best[:, None].expand(-1, FOLDS, -1)).flatten(1)
    rest = logits[:, FOLDS * columns :]
    return (candidates if rest.shape[-1] == 0 else torch.cat([candidates, rest], 1)).topk(k).values


def argmax(logits: Float[Tensor, "N R"]) -> Int[Tensor, " N"]:
    """Return the index of each row's first maximum, or of its first NaN if it has one."""
    if not is_cpu(logits.device):
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))
