"""Write verdicts, and decide greedy requests, which need only the argmax of their rows."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BAD_TARGET


@triton.jit
@no_type_check
def drafted_tokens(batch, req):
    """Load a request's draft tokens [KP]; -1 after the end.

    Call this early: loaded at the end, the tokens would add one more memory latency.
    """
    i = tl.arange(0, batch.traits.KP)
    return tl.load(batch.drafted + req.b * req.K + i, mask=i < req.length, other=-1)


@triton.jit
@no_type_check
def greedy_match(batch, req, points, tokens):
    """Decide a greedy request: accept the draft tokens that equal the argmax, then emit the next argmax.

    Reference: any exact rule of draftproof.rules, on point masses. Returns accepted, the round's last token and the
    fault.
    """
    i = tl.arange(0, batch.traits.KP)
    kept = (i < req.length) & (points >= 0) & (tokens == points)
    accepted, last_token = tl.reduce((tl.where(kept, batch.traits.KP, i), points), 0, _earlier_match)
    return accepted, last_token, tl.where(last_token >= 0, 0, BAD_TARGET)


@triton.jit
@no_type_check
def _earlier_match(at, point, other, another):
    """Reduce to the smaller position and its argmax."""
    return tl.minimum(at, other), tl.where(at < other, point, another)


@triton.jit
@no_type_check
def write_verdict(batch, out, req, tokens, accepted, last_token, fault):
    """Write the accepted tokens, the round's last token and the fault. Reference: rules.chain.verdict."""
    write_tokens(batch, out, req, tokens, accepted, last_token)
    tl.store(out.accepted + req.b, accepted.to(tl.int64))
    tl.store(out.faults + req.b, fault.to(tl.int32))


@triton.jit
@no_type_check
def write_tokens(batch, out, req, tokens, accepted, last_token):
    """Write the accepted tokens, the round's last token, and padding after it."""
    i = tl.arange(0, batch.traits.KP)
    kept = tl.where(i < accepted, tokens, -1)
    J = req.J
    tl.store(out.tokens + req.b * J + i, tl.where(i == accepted, last_token.to(tl.int64), kept), mask=i < J)
