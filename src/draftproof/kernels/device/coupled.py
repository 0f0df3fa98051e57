"""Run coupled verification, one program per request: race the target at each position until the draft token differs.

Reference: `draftproof.rules.coupled`.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import dist_at, dists_of, target_probs
from draftproof.kernels.device.draw import chunk_masses
from draftproof.kernels.device.layout import BAD_TARGET, CHUNK
from draftproof.kernels.device.load_stats import greedy_tokens, load_target_stats, pick, saved_target_stats
from draftproof.kernels.device.philox import POSITION, exponential
from draftproof.kernels.device.rows import request
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write_verdict


@triton.jit
@no_type_check
def coupled(batch, out):
    """Decide one request by the coupled rule. Reference: rules.coupled.coupled. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    tokens = drafted_tokens(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    stats = saved_target_stats(batch, req, load_target_stats(batch, req))
    if req.temperature > 0:
        p = dists_of(stats, req.temperature)
        accepted, winner, fault = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        agreed = req.temperature > 0
        while agreed:
            accepted += 1
            winner, fault = _race(batch, req, p, accepted)
            drafted = tl.sum(tl.where(tl.arange(0, batch.traits.KP) == accepted, tokens, 0), 0)
            agreed = (accepted < req.length) & (winner == drafted) & (fault == 0)
    else:
        accepted, winner, fault = greedy_match(batch, req, greedy_tokens(stats), tokens)
    write_verdict(batch, out, req, tokens, accepted, winner, fault)


@triton.jit
@no_type_check
def _race(batch, req, p, row):
    """Return the token that wins the race after `row` draft tokens, and the fault of that row.

    Reference: core.distribution.race.
    """
    position = req.start + row
    c = tl.arange(0, batch.traits.NP)
    dist, lse = dist_at(p, row, req.temperature), pick(p.lse, row)
    speed = chunk_masses(batch, req, row, dist) / exponential(req.seed, position, POSITION, c, 0)
    chunk = _first_of(speed, c)
    o = chunk * CHUNK + tl.arange(0, CHUNK)
    chances = tl.reshape(target_probs(batch, req, row, dist, o[None, :]), (CHUNK,)).to(tl.float64)
    valid = lse == lse
    winner = _first_of(chances / exponential(req.seed, position, POSITION, o, 1), o)
    return tl.where(valid, winner, -1), tl.where(valid, 0, BAD_TARGET)


@triton.jit
@no_type_check
def _first_of(speed, names):
    """Return the name of the fastest entry, the first one among equals."""
    return tl.min(tl.where(speed == tl.max(speed, 0), names, 2**30), 0)
