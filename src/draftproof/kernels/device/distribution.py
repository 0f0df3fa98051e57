"""Compute p and q of tokens from the statistics of their distribution rows. Reference:
`draftproof.core.distribution`."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BAD_DRAFT, BAD_TARGET, BAD_TOKEN, CENTRE, CUTOFF, GAIN, SLOPE
from draftproof.kernels.device.load_stats import pick, row_stats_at
from draftproof.kernels.device.math import power, slope_of
from draftproof.kernels.device.rows import entry_of, take_draft, take_draft_before, take_target


class DistParams(NamedTuple):
    """Parameters of one distribution, float32: p of logit x is 2^((x − centre) · slope) · gain, 0 below the cutoff."""

    slope: Any
    centre: Any
    gain: Any
    cutoff: Any


class Distributions(NamedTuple):
    """Parameters of several distributions: cutoff and log-sum-exp, float64; centre and gain, float32.

    The log-sum-exp is NaN if a row is not a distribution.
    """

    cutoff: Any
    lse: Any
    centre: Any
    gain: Any


@triton.jit
@no_type_check
def dists_of(rows, temperature):
    """Return the parameters of several rows at once, before it is known which row matters.

    Logarithm and exponential take longer than most of the work that follows them. rows: `RowStats`.
    """
    lse = rows.base + tl.log(rows.mass)
    centre = (lse * temperature).to(tl.float32)  # reference: core.distribution.powers
    gain = tl.exp(centre.to(tl.float64) * (1.0 / temperature) - lse).to(tl.float32)
    return Distributions(cutoff=rows.cutoff, lse=lse, centre=centre, gain=gain)


@triton.jit
@no_type_check
def dist_at(dists, at, temperature):
    """Select the parameters of one row; arbitrary if `at` is outside."""
    cutoff = pick(dists.cutoff, at).to(tl.float32)
    slope = slope_of(1.0 / temperature)
    return DistParams(slope=slope, centre=pick(dists.centre, at), gain=pick(dists.gain, at), cutoff=cutoff)


@triton.jit
@no_type_check
def dist_of_peak(cutoff, base, gain, temperature, scale):
    """Return the parameters of a row whose base belongs to its largest logit and whose mass is 1 / gain.

    Needs neither logarithm nor exponential. The centre differs from the reference's; the probabilities are the same up
    to rounding.
    """
    centre = (base * temperature).to(tl.float32)
    return DistParams(slope=slope_of(scale), centre=centre, gain=gain.to(tl.float32), cutoff=cutoff.to(tl.float32))


@triton.jit
@no_type_check
def dist_of_base(cutoff, base, gain, temperature, scale):
    """Return the parameters of a row with any base.

    A log-sum-exp passed by the drafter is not the base of a logit, so the rounding of the centre has to be corrected.
    """
    dist = dist_of_peak(cutoff, base, gain, temperature, scale)
    correction = tl.exp(dist.centre.to(tl.float64) * scale - base)  # for the rounding of the centre
    return DistParams(slope=dist.slope, centre=dist.centre, gain=(correction * gain).to(tl.float32), cutoff=dist.cutoff)


@triton.jit
@no_type_check
def draft_stats_at(batch, req, row):
    """Return the pointer to the statistics of a draft row, clamped to the last one."""
    return row_stats_at(batch, req, req.J + tl.minimum(row, req.K - 1))


@triton.jit
@no_type_check
def save_dist_params(line, there, dist):
    """Store the parameters of the rows at `line` [S], for programs that share them; cutoffs are stored already."""
    tl.store(line + SLOPE, dist.slope.to(tl.float64), mask=there)
    both = tl.join(dist.centre, dist.gain).to(tl.float64)  # neighbours in memory: exchanged between threads once
    tl.store((line + CENTRE)[:, None] + tl.arange(0, 2)[None, :], both, mask=there[:, None])


@triton.jit
@no_type_check
def load_dist_params(line, there, CUT: tl.constexpr):
    """Load stored parameters of rows. CUT: whether the rows may have cutoffs."""
    centre = tl.load(line + CENTRE, mask=there, other=0.0).to(tl.float32)
    cutoff = tl.full(centre.shape, float("-inf"), tl.float32)
    if CUT:
        cutoff = tl.load(line + CUTOFF, mask=there, other=0.0).to(tl.float32)
    return DistParams(
        slope=tl.load(line + SLOPE, mask=there, other=1.0).to(tl.float32),
        centre=centre,
        gain=tl.load(line + GAIN, mask=there, other=0.0).to(tl.float32),
        cutoff=cutoff,
    )


@triton.jit
@no_type_check
def probs_of(x, dist):
    """Return probabilities of logits x. Reference: core.distribution.powers and Distribution.probs."""
    return tl.where(x < dist.cutoff, 0.0, power(x - dist.centre, dist.slope) * dist.gain)


@triton.jit
@no_type_check
def log_probs(x, scale, rows):
    """Return the log-probability of one logit x [S] in each row, float64; −inf below the cutoff.

    Reference: core.distribution.Distribution.log_probs.
    """
    x = x.to(tl.float64)
    return tl.where(x < rows.cutoff, float("-inf"), scale * x - (rows.base + tl.log(rows.mass)))


class Drafted(NamedTuple):
    """A request's draft [KP].

    i       position
    there   whether there is a token
    token   the token
    known   whether it is in the vocabulary
    target  its logit in the target row
    draft   its logit in the draft row
    """

    i: Any
    there: Any
    token: Any
    known: Any
    target: Any
    draft: Any


@triton.jit
@no_type_check
def drafted_of(batch, req):
    """Load a request's draft: the tokens and their two logits, which need no statistics."""
    i = tl.arange(0, batch.traits.KP)
    there = i < req.length
    x = tl.load(batch.drafted + req.b * req.K + i, mask=there, other=-1)
    known = there & (x >= 0) & (x < batch.sizes.V)
    o = tl.where(known, x, -1).to(tl.int32)
    target = tl.sum(take_target(batch, req, i, o[:, None]), 1)
    draft = target
    if batch.traits.DRAWN:
        entry = tl.where(known, entry_of(batch, o), -1)
        draft = tl.sum(take_draft(batch, req, i, entry[:, None]), 1)
    return Drafted(i=i, there=there, token=x, known=known, target=target, draft=draft)


@triton.jit
@no_type_check
def log_ratios(req, drafted, p, q, p_scale, q_scale):
    """Return log(p/q) of the draft tokens of a sampled request, float64, and fault bits, both [KP].

    Reference: rules.chain.log_ratios. p and q: `RowStats`. A ratio is arbitrary where a fault bit is set.
    """
    known = drafted.known
    fault = (drafted.there & ~known).to(tl.int32) * BAD_TOKEN
    fault |= (p.mass != p.mass).to(tl.int32) * BAD_TARGET
    log_p = tl.where(known, log_probs(drafted.target, p_scale, p), float("-inf"))
    log_q = log_probs(drafted.draft, q_scale, q)
    weighed = known & (drafted.i < tl.where(req.draft_temperature > 0, req.length, 0))
    # a draft token of probability 0 was not drawn from this distribution: the verdict would not be exact
    drawable = log_q > float("-inf")
    fault |= (weighed & ~drawable).to(tl.int32) * BAD_DRAFT
    ratio = tl.where(log_p == float("-inf"), log_p, log_p - tl.where(weighed & drawable, log_q, 0.0))
    return tl.where(drafted.there, ratio, 0.0), fault


@triton.jit
@no_type_check
def draft_prob_of(batch, req, row, dist, drafted, x):
    """Return q of tokens x [T, W] at one draft row. Reference: rules.chain.draft_prob_of.

    Each line of x lies in one chunk; W = 1 if the draft has another vocabulary. `drafted` is the draft token of this
    row.
    """
    q = (x == drafted).to(tl.float32)
    if batch.traits.DRAWN:  # noqa: SIM102  (one is known when compiling, the other is not)
        if req.draft_temperature > 0:
            q = probs_of(take_draft(batch, req, row + tl.zeros([x.shape[0]], tl.int32), entry_of(batch, x)), dist)
    return q


@triton.jit
@no_type_check
def target_probs(batch, req, row, dist, o):
    """Return p of tokens `o` [S, W] at one target row, float32. Reference: Distribution.probs.

    A line of `o` lies in one chunk.
    """
    return probs_of(take_target(batch, req, row + tl.zeros([o.shape[0]], tl.int32), o), dist)


@triton.jit
@no_type_check
def excess(batch, req, row, drafted, p_dist, q_dist, weight, share, o):
    """Return max(0, w·p − share·q) of tokens `o` [S, W], float32. Reference: rules.chain.excess.

    share is 1, or 0 where there is no q. Both rows are loaded before either is used. `drafted` is the draft token here:
    a point mass if it was chosen.
    """
    x = take_target(batch, req, row + tl.zeros([o.shape[0]], tl.int32), o)
    q = (o == drafted).to(tl.float32)
    if batch.traits.DRAWN:
        end = tl.where((share > 0) & (req.draft_temperature > 0), batch.sizes.R, 0)
        y = _draft_logits(batch, req, tl.minimum(row, req.K - 1), o, end)  # after the whole draft there is no draft row
        always = req.K >= 0  # unknown to the compiler, which would otherwise delay one load until the other is used
        x, y = tl.where(always, x, y), tl.where(always, y, x)
        q = tl.where(req.draft_temperature > 0, probs_of(y, q_dist), q)
    p = probs_of(x, p_dist) * weight.to(tl.float32)
    return tl.maximum(tl.where(share > 0, p - q, p), 0.0)


@triton.jit
@no_type_check
def _draft_logits(batch, req, row, o, end):
    """Load the draft logits of tokens `o` [S, W] at one draft row, for entries before `end`."""
    entry = entry_of(batch, o)
    if batch.traits.MAPPED:  # neighbours may lie in different chunks of the draft's vocabulary: one line each
        entry = tl.reshape(entry, (o.shape[0] * o.shape[1], 1))
    y = take_draft_before(batch, req, row + tl.zeros([entry.shape[0]], tl.int32), entry, end)
    return tl.reshape(y, (o.shape[0], o.shape[1]))
