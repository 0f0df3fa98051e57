"""Writing the verdict, and greedy requests, which need nothing but their rows' argmax."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import NO_TARGET_LAW


@triton.jit
@no_type_check
def greedy_match(batch, req, p):
    """Twin: any exact rule on point masses: kept is what equals the argmax, and the next argmax closes."""
    i = tl.arange(0, batch.traits.KP)
    point, mass = tl.where(i <= req.length, p.cutoff, -1.0).to(tl.int32), p.mass
    x = tl.load(batch.drafted + req.b * req.K + i, mask=i < req.length, other=-1).to(tl.int32)
    missed = (i < req.length) & ~((x == point) & (mass == mass))
    accepted = tl.min(tl.where(missed, i, req.length), 0)
    closing = tl.sum(tl.where(i == accepted, point, 0), 0)
    sound = tl.sum(tl.where(i == accepted, mass, 0.0), 0) == 1
    return accepted, tl.where(sound, closing, -1), tl.where(sound, 0, NO_TARGET_LAW)


@triton.jit
@no_type_check
def write(batch, out, req, accepted, closing, fault):
    """Twin: `chain.verdict`."""
    i = tl.arange(0, batch.traits.KP)
    x = tl.load(batch.drafted + req.b * req.K + i, mask=i < accepted, other=-1)
    J = req.J
    tl.store(out.tokens + req.b * J + i, tl.where(i == accepted, closing.to(tl.int64), x), mask=i < J)
    tl.store(out.accepted + req.b, accepted.to(tl.int64))
    tl.store(out.faults + req.b, fault.to(tl.int32))
