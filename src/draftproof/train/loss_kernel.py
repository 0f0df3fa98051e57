"""Compute the training loss on a GPU in one pass: a row of logits is read once and overwritten by its gradient."""

from typing import Final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from draftproof.train.loss import LEAST_OVERLAP as _LEAST_OVERLAP

LEAST_OVERLAP = tl.constexpr(_LEAST_OVERLAP)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)

TOKENS_PER_WARP: Final = 1024
"""Tokens of a row that a warp holds: 32 per thread, of logits and scores, stay in registers."""

MAX_WARPS: Final = 16
"""Warps of a program: 512 threads, which leaves each enough registers."""


def fused_loss_and_gradient(
    logits: Float[Tensor, "m R"], scores: Float[Tensor, "m R"], lse: Float[Tensor, " m"], blend: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, "m R"]]:
    """Return loss, acceptance and gradient in float32 arithmetic; the gradient overwrites `logits`.

    Reference: `loss.loss_and_gradient`.
    """
    m, R = logits.shape
    if not (logits.is_contiguous() and scores.is_contiguous() and lse.is_contiguous()):
        raise ValueError("logits, scores and lse must be contiguous: the kernel steps from row to row by their width")
    loss, overlap = (torch.empty(m, dtype=torch.float32, device=logits.device) for _ in range(2))
    if m:
        compare[(m,)](logits, scores, lse, loss, overlap, R, blend, **launch_options(R))
    return loss, overlap, logits


def launch_options(width: int) -> dict[str, int]:
    """Return the kernel's block size and warps for rows of this width."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(MAX_WARPS, block // TOKENS_PER_WARP))}


@triton.jit
@no_type_check
def compare(logits, scores, lse, losses, overlaps, R, blend, BLOCK: tl.constexpr):
    """Compute one position per program. Grid: (m,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < R
    x = tl.load(logits + row * R + at, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.load(scores + row * R + at, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(score - tl.load(lse + row))
    x -= tl.max(x, 0)
    powers = tl.exp(x)
    total = tl.sum(powers, 0)
    q = powers / total
    mass = tl.sum(p, 0)
    # padding has p = 0 and x = -inf; without the mask their product would be NaN
    entropy = mass * tl.log(total) - tl.sum(p * tl.where(inside, x, 0.0), 0)
    overlap = tl.sum(tl.minimum(q, p), 0)
    below = tl.where(q < p, q, 0.0)
    pull = blend / tl.maximum(overlap, LEAST_OVERLAP)
    scale = (1 - blend) * mass + pull * tl.sum(below, 0)
    slope = q * scale - below * pull - p * (1 - blend)
    tl.store(logits + row * R + at, slope.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + row, (1 - blend) * entropy - blend * tl.log(tl.maximum(overlap, TINY)))
    tl.store(overlaps + row, overlap)
