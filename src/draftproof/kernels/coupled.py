"""Coupled verification, one program a request: the target's own race at each position until the draft differs."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.exponent import LN_2
from draftproof.kernels.laws import line_of, numbers_of, target_probs
from draftproof.kernels.layout import CHUNK, MASS, NO_TARGET_LAW
from draftproof.kernels.noise import POSITION, exponential
from draftproof.kernels.numbers import number_all
from draftproof.kernels.request import law_row, request
from draftproof.kernels.verdict import greedy_match, write


@triton.jit
@no_type_check
def coupled(batch, out):
    """Twin: `verify.coupled.coupled`. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    if not batch.traits.FILTERED:
        number_all(batch, req)
    if req.temperature > 0:
        accepted = tl.zeros((), tl.int32)
        closing, fault = _race(batch, req, accepted)
        while (accepted < req.length) & (closing == _drafted(batch, req, accepted)) & (fault == 0):
            accepted += 1
            closing, fault = _race(batch, req, accepted)
    else:
        accepted, closing, fault = greedy_match(batch, req)
    write(batch, out, req, accepted, closing, fault)


@triton.jit
@no_type_check
def _drafted(batch, req, i):
    return tl.load(batch.drafted + req.b * batch.sizes.K + i, mask=i < req.length, other=-1).to(tl.int32)


@triton.jit
@no_type_check
def _race(batch, req, row):
    """Twin: `race.run`. The token that wins behind `row` draft tokens, and whether that row is a law."""
    C, place = batch.sizes.C, req.start + row
    mass = tl.load(line_of(batch, req, row) + MASS)
    c = tl.arange(0, batch.traits.NP)
    stats = batch.stats + law_row(batch, req, row) * 2 * C + c
    m = tl.load(stats, mask=c < C, other=float("-inf")).to(tl.float64)
    s = tl.load(stats + C, mask=c < C, other=0.0).to(tl.float64)
    law = numbers_of(batch, req, row)
    s *= tl.exp((m - law.centre.to(tl.float64)) * (law.slope.to(tl.float64) * LN_2))
    speed = s / exponential(req.seed, place, POSITION, c, 0)
    chunk = _first_of(speed, c)
    o = chunk * CHUNK + tl.arange(0, CHUNK)
    p = tl.reshape(target_probs(batch, req, row, law, o[None, :]), (CHUNK,)).to(tl.float64)
    sound = mass == mass
    winner = _first_of(p / exponential(req.seed, place, POSITION, o, 1), o)
    return tl.where(sound, winner, -1), tl.where(sound, 0, NO_TARGET_LAW)


@triton.jit
@no_type_check
def _first_of(speed, names):
    """The name of the fastest, the first where several are."""
    return tl.min(tl.where(speed == tl.max(speed, 0), names, 2**30), 0)
