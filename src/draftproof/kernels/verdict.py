"""Writing the verdict, and greedy requests, which need nothing but their rows' argmax."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import NO_TARGET_LAW


@triton.jit
@no_type_check
def drafted_tokens(batch, req):
    """[KP], -1 behind the end. Best asked for early: who waits for them when all is done waits once more."""
    i = tl.arange(0, batch.traits.KP)
    return tl.load(batch.drafted + req.b * req.K + i, mask=i < req.length, other=-1)


@triton.jit
@no_type_check
def greedy_match(batch, req, p, tokens):
    """Twin: any exact rule on point masses: kept is what equals the argmax, and the next argmax closes."""
    i = tl.arange(0, batch.traits.KP)
    point, mass = tl.where(i <= req.length, p.cutoff, -1.0).to(tl.int32), p.mass
    missed = (i < req.length) & ~((tokens.to(tl.int32) == point) & (mass == mass))
    accepted = tl.min(tl.where(missed, i, req.length), 0)
    closing = tl.sum(tl.where(i == accepted, point, 0), 0)
    sound = tl.sum(tl.where(i == accepted, mass, 0.0), 0) == 1
    return accepted, tl.where(sound, closing, -1), tl.where(sound, 0, NO_TARGET_LAW)


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
