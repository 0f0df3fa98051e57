"""Distributions on the device: p and q of tokens, once a distribution row's numbers are known. Twin: `draftproof.core.distribution`."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BAD_DRAFT, BAD_TARGET, BAD_TOKEN, CENTRE, CUTOFF, GAIN, SLOPE
from draftproof.kernels.device.math import power, slope_of
from draftproof.kernels.device.rows import entry_of, take_draft, take_draft_before, take_target
from draftproof.kernels.device.stats import line_of, pick


class Numbers(NamedTuple):
    """Of one distribution row, as float32: p of logit x is 2^((x − centre) · slope) · gain, 0 below the cutoff."""

    slope: Any
    centre: Any
    gain: Any
    cutoff: Any


class Distributions(NamedTuple):
    """Of several distribution rows: cutoff and log-sum-exp, float64; centre and gain. The log-sum-exp of no distribution is NaN."""

    cutoff: Any
    lse: Any
    centre: Any
    gain: Any


@triton.jit
@no_type_check
def dists_of(rows, temperature):
    """Of rows of these numbers (`Settled`), all at once, before it is known which of them matters: logarithm and
    exponential take longer than most that comes behind them."""
    lse = rows.base + tl.log(rows.mass)
    centre = (lse * temperature).to(tl.float32)  # twin: `distribution.powers`
    gain = tl.exp(centre.to(tl.float64) * (1.0 / temperature) - lse).to(tl.float32)
    return Distributions(cutoff=rows.cutoff, lse=lse, centre=centre, gain=gain)


@triton.jit
@no_type_check
def dist_at(dists, at, temperature):
    """One of them; of a row that is never looked at, anything."""
    cutoff = pick(dists.cutoff, at).to(tl.float32)
    slope = slope_of(1.0 / temperature)
    return Numbers(slope=slope, centre=pick(dists.centre, at), gain=pick(dists.gain, at), cutoff=cutoff)


@triton.jit
@no_type_check
def dist_of_peak(cutoff, base, gain, temperature, scale):
    """Of one row whose base is that of its largest logit and whose mass is 1 / gain: neither a logarithm nor an
    exponential is needed. The centre is another one than the twin's, and what is made of it the same up to rounding."""
    centre = (base * temperature).to(tl.float32)
    return Numbers(slope=slope_of(scale), centre=centre, gain=gain.to(tl.float32), cutoff=cutoff.to(tl.float32))


@triton.jit
@no_type_check
def dist_of_base(cutoff, base, gain, temperature, scale):
    """Of one row, whatever its base: a log-sum-exp that was handed over is no logit's."""
    dist = dist_of_peak(cutoff, base, gain, temperature, scale)
    made_up = tl.exp(dist.centre.to(tl.float64) * scale - base)  # for the rounding of the centre
    return Numbers(slope=dist.slope, centre=dist.centre, gain=(made_up * gain).to(tl.float32), cutoff=dist.cutoff)


@triton.jit
@no_type_check
def draft_line_of(batch, req, row):
    return line_of(batch, req, req.J + tl.minimum(row, req.K - 1))


@triton.jit
@no_type_check
def write_numbers(line, there, dist):
    """Write down the numbers of rows that stand at `line` [S], for programs that all need them; cutoffs are there."""
    tl.store(line + SLOPE, dist.slope.to(tl.float64), mask=there)
    both = tl.join(dist.centre, dist.gain).to(tl.float64)  # they stand side by side, and go from thread to thread once
    tl.store((line + CENTRE)[:, None] + tl.arange(0, 2)[None, :], both, mask=there[:, None])


@triton.jit
@no_type_check
def written_numbers(line, there, CUT: tl.constexpr):
    """Of rows whose numbers are written down. CUT: whether they may have cutoffs."""
    centre = tl.load(line + CENTRE, mask=there, other=0.0).to(tl.float32)
    cutoff = tl.full(centre.shape, float("-inf"), tl.float32)
    if CUT:
        cutoff = tl.load(line + CUTOFF, mask=there, other=0.0).to(tl.float32)
    return Numbers(
        slope=tl.load(line + SLOPE, mask=there, other=1.0).to(tl.float32),
        centre=centre,
        gain=tl.load(line + GAIN, mask=there, other=0.0).to(tl.float32),
        cutoff=cutoff,
    )


@triton.jit
@no_type_check
def probs_of(x, dist):
    """Twin: `distribution.powers`, and what `Distribution.probs` makes of it."""
    return tl.where(x < dist.cutoff, 0.0, power(x - dist.centre, dist.slope) * dist.gain)


@triton.jit
@no_type_check
def log_probs(x, scale, rows):
    """Twin: `Distribution.log_probs`. float64, −inf below the cutoff, of one logit x [S] in each row."""
    x = x.to(tl.float64)
    return tl.where(x < rows.cutoff, float("-inf"), scale * x - (rows.base + tl.log(rows.mass)))


class Drafted(NamedTuple):
    """A request's draft: place [KP], whether there is a token and which, whether it can be one, its logit in both
    rows."""

    i: Any
    there: Any
    token: Any
    known: Any
    target: Any
    draft: Any


@triton.jit
@no_type_check
def drafted_of(batch, req):
    """What can be known of the draft before any distribution is: two logits a token."""
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
    """Twin: `chain.log_ratios`, for a request that is not greedy. p and q: its rows' numbers.

    Returns the ratios, float64, and what is wrong, as bits, both [KP]: where something is, a ratio may be anything.
    """
    known = drafted.known
    fault = (drafted.there & ~known).to(tl.int32) * BAD_TOKEN
    fault |= (p.mass != p.mass).to(tl.int32) * BAD_TARGET
    log_p = tl.where(known, log_probs(drafted.target, p_scale, p), float("-inf"))
    log_q = log_probs(drafted.draft, q_scale, q)
    weighed = known & (drafted.i < tl.where(req.draft_temperature > 0, req.length, 0))
    # an impossible draft token was not drawn from this distribution, and then nothing here would be exact
    drawable = log_q > float("-inf")
    fault |= (weighed & ~drawable).to(tl.int32) * BAD_DRAFT
    ratio = tl.where(log_p == float("-inf"), log_p, log_p - tl.where(weighed & drawable, log_q, 0.0))
    return tl.where(drafted.there, ratio, 0.0), fault


@triton.jit
@no_type_check
def draft_prob_of(batch, req, row, dist, drafted, x):
    """Twin: `chain.draft_prob_of`. q of tokens x at one draft row, of which each line lies in one chunk: [T, W], and
    W = 1 where the draft's vocabulary is another one. `drafted` is the token drafted there."""
    q = (x == drafted).to(tl.float32)
    if batch.traits.DRAWN:  # noqa: SIM102  (one is known when compiling, the other is not)
        if req.draft_temperature > 0:
            q = probs_of(take_draft(batch, req, row + tl.zeros([x.shape[0]], tl.int32), entry_of(batch, x)), dist)
    return q


@triton.jit
@no_type_check
def target_probs(batch, req, row, dist, o):
    """Twin: `Distribution.probs`. p of tokens `o` [S, W] at one target row, float32; a line of `o` lies in one chunk."""
    return probs_of(take_target(batch, req, row + tl.zeros([o.shape[0]], tl.int32), o), dist)


@triton.jit
@no_type_check
def excess(batch, req, row, drafted, p_dist, q_dist, weight, share, o):
    """Twin: `chain.excess`. max(0, w·p − share·q) of tokens `o` [S, W], float32; share is 1, or 0 where no q is.

    Both rows are asked for before one is worked on. `drafted` stands there: a point mass, where it was chosen.
    """
    x = take_target(batch, req, row + tl.zeros([o.shape[0]], tl.int32), o)
    q = (o == drafted).to(tl.float32)
    if batch.traits.DRAWN:
        end = tl.where((share > 0) & (req.draft_temperature > 0), batch.sizes.R, 0)
        y = _draft_logits(batch, req, tl.minimum(row, req.K - 1), o, end)  # behind the whole draft there is none
        always = req.K >= 0  # the compiler cannot know, and would put off one load until the other is worked on
        x, y = tl.where(always, x, y), tl.where(always, y, x)
        q = tl.where(req.draft_temperature > 0, probs_of(y, q_dist), q)
    p = probs_of(x, p_dist) * weight.to(tl.float32)
    return tl.maximum(tl.where(share > 0, p - q, p), 0.0)


@triton.jit
@no_type_check
def _draft_logits(batch, req, row, o, end):
    """Of tokens `o` [S, W] at one draft row, whose entries before `end` are looked at."""
    entry = entry_of(batch, o)
    if batch.traits.MAPPED:  # neighbours need not lie in one chunk of the draft's vocabulary: a line each
        entry = tl.reshape(entry, (o.shape[0] * o.shape[1], 1))
    y = take_draft_before(batch, req, row + tl.zeros([entry.shape[0]], tl.int32), entry, end)
    return tl.reshape(y, (o.shape[0], o.shape[1]))
