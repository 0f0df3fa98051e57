"""Token verification, one program a request: decide, and close by thinning. No row is read again."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.closing import thin, trials_of
from draftproof.kernels.draws import chunk_stats
from draftproof.kernels.laws import drafted_of, law_at, laws_of, log_ratios, warm
from draftproof.kernels.layout import NO_TARGET_LAW
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import draft_known, draft_settled, pick, target_known, target_settled
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
    known, stats = target_known(batch, req), chunk_stats(batch, req)
    if batch.traits.DRAWN:
        draft = draft_known(batch, req)
    settled = target_settled(batch, req, known)
    if req.temperature > 0:
        p = laws_of(settled, req.temperature)
        q = p
        if batch.traits.DRAWN:
            q = laws_of(draft_settled(batch, req, draft), warm(req.draft_temperature))
        ratios, fault = log_ratios(batch, req, drafted, p, q)
        # log u < log p/q, strict and with u in [0, 1): what p cannot say is never kept, not even by a coin of 0
        accepted = tl.min(tl.where(drafted.there & ~(coins < ratios), drafted.i, req.length), 0)
        lse = pick(p.lse, accepted)
        fault |= tl.where(lse == lse, 0, NO_TARGET_LAW)
        closing = tl.full((), -1, tl.int32)
        if fault == 0:
            p_law, q_law = law_at(p, accepted, req.temperature), law_at(q, accepted, warm(req.draft_temperature))
            closing = thin(batch, req, accepted, drafted, p_law, q_law, stats, trials)
    else:
        accepted, closing, fault = greedy_match(batch, req, settled, drafted.token)
    write(batch, out, req, drafted.token, accepted, closing, fault)
