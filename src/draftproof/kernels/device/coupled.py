"""Coupled verification, one program a request: the target's own race at each position until the draft differs."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import dist_at, dists_of, target_probs
from draftproof.kernels.device.draw import chunk_masses
from draftproof.kernels.device.layout import BAD_TARGET, CHUNK
from draftproof.kernels.device.philox import POSITION, exponential
from draftproof.kernels.device.rows import request
from draftproof.kernels.device.stats import pick, points_of, target_known, target_settled
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write


@triton.jit
@no_type_check
def coupled(batch, out):
    """Twin: `rules.coupled.coupled`. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    tokens = drafted_tokens(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    settled = target_settled(batch, req, target_known(batch, req))
    if req.temperature > 0:
        p = dists_of(settled, req.temperature)
        accepted, closing, fault = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        agreed = req.temperature > 0
        while agreed:
            accepted += 1
            closing, fault = _race(batch, req, p, accepted)
            drafted = tl.sum(tl.where(tl.arange(0, batch.traits.KP) == accepted, tokens, 0), 0)
            agreed = (accepted < req.length) & (closing == drafted) & (fault == 0)
    else:
        accepted, closing, fault = greedy_match(batch, req, points_of(settled), tokens)
    write(batch, out, req, tokens, accepted, closing, fault)


@triton.jit
@no_type_check
def _race(batch, req, p, row):
    """Twin: `race.run`. The token that wins behind `row` draft tokens, and whether that row is a distribution."""
    place = req.start + row
    c = tl.arange(0, batch.traits.NP)
    dist, lse = dist_at(p, row, req.temperature), pick(p.lse, row)
    speed = chunk_masses(batch, req, row, dist) / exponential(req.seed, place, POSITION, c, 0)
    chunk = _first_of(speed, c)
    o = chunk * CHUNK + tl.arange(0, CHUNK)
    chances = tl.reshape(target_probs(batch, req, row, dist, o[None, :]), (CHUNK,)).to(tl.float64)
    sound = lse == lse
    winner = _first_of(chances / exponential(req.seed, place, POSITION, o, 1), o)
    return tl.where(sound, winner, -1), tl.where(sound, 0, BAD_TARGET)


@triton.jit
@no_type_check
def _first_of(speed, names):
    """The name of the fastest, the first where several are."""
    return tl.min(tl.where(speed == tl.max(speed, 0), names, 2**30), 0)
