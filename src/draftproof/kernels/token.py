"""Token verification, one program a request: decide, and close by thinning. No row is read again."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.closing import draw_ahead, thin
from draftproof.kernels.laws import drafted_of, line_of, log_ratios
from draftproof.kernels.layout import MASS, NO_TARGET_LAW
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import number_all
from draftproof.kernels.request import request
from draftproof.kernels.verdict import greedy_match, write


@triton.jit
@no_type_check
def token(batch, out):
    """Twin: `verify.token.token`. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    drafted = drafted_of(batch, req)
    coins = tl.log(uniform(req.seed, req.start, ACCEPT, drafted.i, 0))
    draw_ahead(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()  # what stands above does not depend on the scan, and is done while it ends
    if not batch.traits.FILTERED:
        number_all(batch, req)
    if req.temperature > 0:
        ratios, fault = log_ratios(batch, req, drafted)
        # log u < log p/q, strict and with u in [0, 1): what p cannot say is never kept, not even by a coin of 0
        accepted = tl.min(tl.where(drafted.there & ~(coins < ratios), drafted.i, req.length), 0)
        mass = tl.load(line_of(batch, req, accepted) + MASS)
        fault |= tl.where(mass == mass, 0, NO_TARGET_LAW)
        closing = tl.full((), -1, tl.int32)
        if fault == 0:
            closing = thin(batch, req, accepted)
    else:
        accepted, closing, fault = greedy_match(batch, req)
    write(batch, out, req, accepted, closing, fault)
