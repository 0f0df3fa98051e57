"""Laws on the device: p and q of tokens, once a law row's numbers are known. Twin: `draftproof.core.law`."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import CENTRE, CUTOFF, GAIN, NO_DRAFT_LAW, NO_SUCH_TOKEN
from draftproof.kernels.numbers import line_of, pick
from draftproof.kernels.rows import entry_of, take_draft, take_target


class Numbers(NamedTuple):
    """Of one law row, as float32: p of logit x is 2^((x − centre) · slope) · gain, 0 below the cutoff."""

    slope: Any
    centre: Any
    gain: Any
    cutoff: Any


class Laws(NamedTuple):
    """Of several law rows: cutoff and log-sum-exp, float64; centre and gain. The log-sum-exp of no law is NaN."""

    cutoff: Any
    lse: Any
    centre: Any
    gain: Any


@triton.jit
@no_type_check
def laws_of(rows, temperature):
    """Of rows of these numbers (`Settled`), all at once, before it is known which of them matters: logarithm and
    exponential take longer than most that comes behind them."""
    lse = rows.base + tl.log(rows.mass)
    centre = (lse * temperature).to(tl.float32)  # twin: `law.powers`
    gain = tl.exp(centre.to(tl.float64) * (1.0 / temperature) - lse).to(tl.float32)
    return Laws(cutoff=rows.cutoff, lse=lse, centre=centre, gain=gain)


@triton.jit
@no_type_check
def law_at(laws, at, temperature):
    """One of them; of a row that is never looked at, anything."""
    cutoff = pick(laws.cutoff, at).to(tl.float32)
    slope = slope_of(1.0 / temperature)
    return Numbers(slope=slope, centre=pick(laws.centre, at), gain=pick(laws.gain, at), cutoff=cutoff)


@triton.jit
@no_type_check
def law_of_peak(cutoff, base, gain, temperature, scale):
    """Of one row whose base is that of its largest logit and whose mass is 1 / gain: neither a logarithm nor an
    exponential is needed. The centre is another one than the twin's, and what is made of it the same up to rounding."""
    centre = (base * temperature).to(tl.float32)
    return Numbers(slope=slope_of(scale), centre=centre, gain=gain.to(tl.float32), cutoff=cutoff.to(tl.float32))


@triton.jit
@no_type_check
def law_of_base(cutoff, base, gain, temperature, scale):
    """Of one row, whatever its base: a log-sum-exp that was handed over is no logit's."""
    law = law_of_peak(cutoff, base, gain, temperature, scale)
    made_up = tl.exp(law.centre.to(tl.float64) * scale - base)  # for the rounding of the centre
    return Numbers(slope=law.slope, centre=law.centre, gain=(made_up * gain).to(tl.float32), cutoff=law.cutoff)


@triton.jit
@no_type_check
def draft_line_of(batch, req, row):
    return line_of(batch, req, req.J + tl.minimum(row, req.K - 1))


@triton.jit
@no_type_check
def warm(temperature):
    """A temperature that can be divided by: greedy rows are never weighed."""
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
@no_type_check
def write_centres(line, there, laws):
    """Write down centre and gain of rows whose numbers stand at `line` [S], for programs that all need them."""
    tl.store(line + CENTRE, laws.centre.to(tl.float64), mask=there)
    tl.store(line + GAIN, laws.gain.to(tl.float64), mask=there)


@triton.jit
@no_type_check
def written_numbers(line, temperature):
    """Of a row whose centre and gain are written down."""
    return Numbers(
        slope=slope_of(1.0 / temperature),
        centre=tl.load(line + CENTRE).to(tl.float32),
        gain=tl.load(line + GAIN).to(tl.float32),
        cutoff=tl.load(line + CUTOFF).to(tl.float32),
    )


@triton.jit
@no_type_check
def probs_of(x, law):
    """Twin: `law.powers`, and what `Law.probs` makes of it."""
    return tl.where(x < law.cutoff, 0.0, power(x - law.centre, law.slope) * law.gain)


@triton.jit
@no_type_check
def log_probs(x, scale, laws):
    """Twin: `Law.log_probs`. float64, −inf below the cutoff, of one logit x [S] in each row."""
    x = x.to(tl.float64)
    return tl.where(x < laws.cutoff, float("-inf"), scale * x - laws.lse)


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
    """What can be known of the draft before any law is: two logits a token."""
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
def log_ratios(batch, req, drafted, p, q):
    """Twin: `chain.log_ratios`, for a request that is not greedy. p and q: its rows' laws.

    Returns the ratios, float64, NaN where a row is no law, and what is wrong with the draft, as bits.
    """
    known = drafted.known
    fault = tl.max((drafted.there & ~known).to(tl.int32), 0) * NO_SUCH_TOKEN
    ratio = log_probs(drafted.target, 1.0 / req.temperature, p)
    ratio = tl.where(known, ratio, float("-inf"))
    if batch.traits.DRAWN:
        log_q = log_probs(drafted.draft, 1.0 / warm(req.draft_temperature), q)
        log_q = tl.where(req.draft_temperature > 0, tl.where(known, log_q, 0.0), 0.0)
        # an impossible draft token was not drawn from this law, and then nothing here would be exact
        fault |= tl.max((~(log_q > float("-inf"))).to(tl.int32), 0) * NO_DRAFT_LAW
        ratio = tl.where(ratio == float("-inf"), ratio, ratio - log_q)
    return tl.where(drafted.there, ratio, 0.0), fault


@triton.jit
@no_type_check
def draft_prob_of(batch, req, row, law, drafted, x):
    """Twin: `chain.draft_prob_of`. q of tokens x at one draft row, of which each line lies in one chunk: [T, W], and
    W = 1 where the draft's vocabulary is another one. `drafted` is the token drafted there."""
    q = (x == drafted).to(tl.float32)
    if batch.traits.DRAWN:  # noqa: SIM102  (one is known when compiling, the other is not)
        if req.draft_temperature > 0:
            q = probs_of(take_draft(batch, req, row + tl.zeros([x.shape[0]], tl.int32), entry_of(batch, x)), law)
    return q


@triton.jit
@no_type_check
def target_probs(batch, req, row, law, o):
    """Twin: `Law.probs`. p of tokens `o` [S, W] at one target row, float32; a line of `o` lies in one chunk."""
    return probs_of(take_target(batch, req, row + tl.zeros([o.shape[0]], tl.int32), o), law)


@triton.jit
@no_type_check
def draft_probs(batch, req, row, law, o):
    """Twin: `chain.draft_probs`. q of tokens `o` at one draft row, float32; a point mass where it was chosen."""
    q = (o == tl.load(batch.drafted + req.b * req.K + row)).to(tl.float32)
    if batch.traits.DRAWN:  # noqa: SIM102  (one is known when compiling, the other is not)
        if req.draft_temperature > 0:
            entry = entry_of(batch, o)
            if batch.traits.MAPPED:  # neighbours need not lie in one chunk of the draft's vocabulary: a line each
                entry = tl.reshape(entry, (o.shape[0] * o.shape[1], 1))
            x = take_draft(batch, req, row + tl.zeros([entry.shape[0]], tl.int32), entry)
            if batch.traits.MAPPED:
                x = tl.reshape(x, (o.shape[0], o.shape[1]))
            q = probs_of(x, law)
    return q


@triton.jit
@no_type_check
def excess(batch, req, row, p_law, q_law, weight, share, o):
    """Twin: `chain.excess`. max(0, w·p − share·q) of tokens `o` [S, W], float32; share is 1, or 0 where no q is."""
    p = target_probs(batch, req, row, p_law, o) * weight.to(tl.float32)
    q = draft_probs(batch, req, tl.minimum(row, req.K - 1), q_law, o)
    return tl.maximum(tl.where(share > 0, p - q, p), 0.0)
