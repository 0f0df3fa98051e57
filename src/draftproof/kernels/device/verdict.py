"""Write a verdict, and decide greedy requests, which need only their rows' argmax."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BAD_TARGET


@triton.jit
@no_type_check
def drafted_tokens(batch, req):
    """[KP], -1 behind the end. Best asked for early: who waits for them when all is done waits once more."""
    i = tl.arange(0, batch.traits.KP)
    return tl.load(batch.drafted + req.b * req.K + i, mask=i < req.length, other=-1)


@triton.jit
@no_type_check
def greedy_match(batch, req, points, tokens):
    """Twin: any exact rule on point masses: kept is what equals the argmax, and the next argmax closes."""
    i = tl.arange(0, batch.traits.KP)
    kept = (i < req.length) & (points >= 0) & (tokens == points)
    accepted, closing = tl.reduce((tl.where(kept, batch.traits.KP, i), points), 0, _earlier_match)
    return accepted, closing, tl.where(closing >= 0, 0, BAD_TARGET)


@triton.jit
@no_type_check
def _earlier_match(at, point, other, another):
    return tl.minimum(at, other), tl.where(at < other, point, another)


@triton.jit
@no_type_check
def write(batch, out, req, tokens, accepted, closing, fault):
    """Twin: `chain.verdict`."""
    i = tl.arange(0, batch.traits.KP)
    kept = tl.where(i < accepted, tokens, -1)
    J = req.J
    tl.store(out.tokens + req.b * J + i, tl.where(i == accepted, closing.to(tl.int64), kept), mask=i < J)
    tl.store(out.accepted + req.b, accepted.to(tl.int64))
    tl.store(out.faults + req.b, fault.to(tl.int32))
