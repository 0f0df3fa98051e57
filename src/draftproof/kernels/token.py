"""Token verification, one program a request: decide, and close by thinning. No row is read again."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.closing import thin, trials_of
from draftproof.kernels.laws import drafted_of, law_of, log_ratios, warm
from draftproof.kernels.layout import NO_TARGET_LAW
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import draft_settled, picked, target_settled
from draftproof.kernels.request import request
from draftproof.kernels.verdict import greedy_match, write


@triton.jit
@no_type_check
def token(batch, out):
    """Twin: `verify.token.token`. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    drafted = drafted_of(batch, req)
    coins = tl.log(uniform(req.seed, req.start, ACCEPT, drafted.i, 0))
    trials = trials_of(req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()  # what stands above does not depend on the scan, and is done while it ends
    p = target_settled(batch, req)
    q = p
    if batch.traits.DRAWN:
        q = draft_settled(batch, req)
    if req.temperature > 0:
        ratios, fault = log_ratios(batch, req, drafted, p, q)
        # log u < log p/q, strict and with u in [0, 1): what p cannot say is never kept, not even by a coin of 0
        accepted = tl.min(tl.where(drafted.there & ~(coins < ratios), drafted.i, req.length), 0)
        stop = picked(p, accepted)
        fault |= tl.where(stop.mass == stop.mass, 0, NO_TARGET_LAW)
        closing = tl.full((), -1, tl.int32)
        if fault == 0:
            q_law = law_of(picked(q, accepted), warm(req.draft_temperature))
            closing = thin(batch, req, accepted, law_of(stop, req.temperature), q_law, trials)
    else:
        accepted, closing, fault = greedy_match(batch, req, p)
    write(batch, out, req, accepted, closing, fault)
