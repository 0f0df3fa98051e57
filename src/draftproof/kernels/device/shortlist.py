"""Find a row's cutoff among few candidate logits: bound it, gather the candidates, rank them, cut."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import SLICE
from draftproof.kernels.device.math import LOG2_E, fast_exp2, key, value
from draftproof.kernels.device.slice_lists import NO_SLICE, as_float, as_int, load_parts

COUNT_PIVOTS = tl.constexpr(8)
COUNT_STEPS = tl.constexpr(7)  # at most
MASS_PIVOTS = tl.constexpr(4)  # few: each costs an exponential
MASS_STEPS = tl.constexpr(3)  # few: a bound need not be tight
BOUND_SLACK = tl.constexpr(1e-5)  # relative: a bound must hold in spite of rounding
ROW_MASS = tl.constexpr(2**30)  # integer that represents the mass of a row


@triton.jit
@no_type_check
def bound_count(m, peak, least, k):
    """Return a logit that at least k logits reach: the largest logits of k slices do; −inf if there are fewer slices.

    The search ends as soon as not many more than k slices reach it.
    """
    NS: tl.constexpr = m.shape[0]
    line = tl.reshape(m, (1, NS))  # keeps the layout of m: each thread holds the counts of all pivots
    low, high = least, peak
    enough, reached, n = peak >= least, k + k, 0
    one = enough.to(tl.int32)  # unknown to the compiler, which would otherwise pack bits and count them
    while enough & (reached > k + k // 4) & (n < COUNT_STEPS):
        here = tl.sum(tl.where(line >= _pivots(low, high, COUNT_PIVOTS)[:, None], one, 0), 1)
        count = tl.sum((here >= k).to(tl.int32), 0)
        reached = tl.min(tl.where(here >= k, here, NS), 0)
        enough = count > 0
        low, high = _between_pivots(low, high, count, COUNT_PIVOTS)
        n += 1
    return tl.where(enough, low, float("-inf"))


@triton.jit
@no_type_check
def bound_mass(m, peak, least, mass, total, scale, goal):
    """Return a lower bound of the cutoff of a nucleus of mass `goal`, relative to the peak.

    A slice whose largest logit reaches v has at least that logit's mass above v, and at least its whole mass less what
    the others can have below v. And all logits below v have at most the mass of that many v: while that is no more than
    the mass outside the nucleus, the cutoff is not below v.
    """
    total, scale, goal = total.to(tl.float32), scale.to(tl.float32), goal.to(tl.float32)
    NS: tl.constexpr = m.shape[0]
    unit, slope = 1.0 / total * ROW_MASS, scale * LOG2_E
    line = tl.reshape(m, (1, NS))
    top = (fast_exp2((line - peak) * slope) * unit).to(tl.int32)
    mass = (tl.reshape(mass, (1, NS)) * unit).to(tl.int32)
    wanted = (goal * (1 + BOUND_SLACK) * unit).to(tl.int32) + 1
    others = tl.log(unit * ((SLICE - 1) * (1 + BOUND_SLACK))) * LOG2_E
    low, high, found = least, peak, peak < least
    for _ in range(MASS_STEPS):
        pivots = _pivots(low, high, MASS_PIVOTS)
        under = tl.minimum(fast_exp2(tl.fma(pivots - peak, slope, others)), ROW_MASS).to(tl.int32) + 1
        least_mass = tl.maximum(top, mass - under[:, None])
        enough = tl.sum(tl.where(line >= pivots[:, None], least_mass, 0), 1) >= wanted
        count = tl.sum(enough.to(tl.int32), 0)
        found |= count > 0
        low, high = _between_pivots(low, high, count, MASS_PIVOTS)
    spare = total * (1 - BOUND_SLACK) - goal * (1 + BOUND_SLACK)
    even = peak + tl.log(tl.maximum(spare, 0.0) / (SLICE * NS)) / scale
    return tl.maximum(even - BOUND_SLACK / scale, tl.where(found, low, float("-inf")))


@triton.jit
@no_type_check
def _pivots(low, high, COUNT: tl.constexpr):
    """Return COUNT evenly spaced numbers from `low` on."""
    return _pivot(low, high, tl.arange(0, COUNT), COUNT)


@triton.jit
@no_type_check
def _between_pivots(low, high, enough, COUNT: tl.constexpr):
    """Return the two pivots, or the last pivot and `high`, around the highest pivot with enough above it."""
    first = _pivot(low, high, tl.maximum(enough - 1, 0), COUNT)
    return first, tl.where(enough < COUNT, _pivot(low, high, enough, COUNT), high)


@triton.jit
@no_type_check
def _pivot(low, high, p, COUNT: tl.constexpr):
    """Return the p-th pivot."""
    return tl.where(p == 0, low, tl.fma(high - low, p.to(tl.float32) * (1.0 / COUNT), low))


COMPARED = tl.constexpr(32)  # logits that all others are compared with in one step
LOWEST = tl.constexpr(-3.4028234663852886e38)  # most negative finite float32
PEAK_MASS = tl.constexpr(2**31)  # the peak's mass as an integer
COUNT_ONE = tl.constexpr(2**40)  # one count; above any sum of the masses that are ever ranked
WARPS = tl.constexpr(8)  # warps that a program is assumed to have
INF_KEY = tl.constexpr(0x7F800000)  # the key of +inf


@triton.jit
@no_type_check
def gather(batch, req, view, low, high, buffer, MOST: tl.constexpr, WITH_SLICES: tl.constexpr):
    """Write the logits in [low, high) of a view's slices to `buffer`, at most MOST, slice by slice in order.

    WITH_SLICES: the slice of each logit is written as well, MOST entries later. A `high` of None is no limit. Returns
    how many such logits there are; if that is at most MOST, all were written.

    A slice lies in one warp, which holds PER_WARP consecutive slices: the number of logits before a thread's own is
    then counted for all of them together, one byte each.
    """
    PER_WARP: tl.constexpr = 4 if batch.traits.EDITED or batch.traits.MASKED else 8
    LINES: tl.constexpr = PER_WARP * WARPS
    line = tl.arange(0, LINES)
    low = tl.maximum(low, LOWEST)
    found = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the buffer may still be read
    for n in range(0, view.count, LINES):
        which, x = load_parts(batch, req, view, n + line % WARPS * PER_WARP + line // WARPS)
        bits = _in_range(x[0], low, high).to(tl.int32)
        for i in tl.static_range(1, len(x)):
            bits |= _in_range(x[i], low, high).to(tl.int32) << i
        before, upto, more = _slots(bits, PER_WARP)
        bits = tl.where(found + upto <= MOST, bits, 0)
        name = tl.broadcast_to(as_float(which)[None, :], bits.shape)
        at = found + before
        for i in tl.static_range(len(x)):
            here = (bits >> i) & 1
            tl.store(buffer + at, x[i], mask=here > 0)
            if WITH_SLICES:
                tl.store(buffer + at + MOST, name, mask=here > 0)
            at += here
        found += more
    tl.debug_barrier()
    return found


@triton.jit
@no_type_check
def _slots(bits, PER_WARP: tl.constexpr):
    """Count set bits: before each position, up to the end of its slice, and in total.

    bits [width, lines] has up to four bits per position; the slices of a warp are consecutive.
    """
    WIDTH: tl.constexpr = bits.shape[0]
    WORDS: tl.constexpr = PER_WARP // 4
    LINES: tl.constexpr = PER_WARP * WARPS
    byte = (tl.arange(0, 4) * 8)[None, :, None, None]
    bits = tl.permute(tl.reshape(bits, (WIDTH, WORDS, 4, WARPS)), (1, 2, 3, 0))
    packed = tl.sum(bits << byte, 1)
    packed -= (packed >> 1) & 0x55555555
    packed = (packed & 0x33333333) + ((packed >> 2) & 0x33333333)  # population count of each nibble
    within = tl.cumsum(packed, 2) - packed
    all_of = tl.sum(packed, 2)
    each = ((all_of[:, :, None] + tl.zeros([1, 1, WIDTH], tl.int32))[:, None] >> byte) & 0xFF
    each = tl.reshape(each, (PER_WARP, WARPS, WIDTH))
    pairs = (all_of & 0xFF00FF) + ((all_of >> 8) & 0xFF00FF)
    per_warp = tl.sum((pairs & 0xFFFF) + (pairs >> 16), 0)
    of_warps = tl.cumsum(per_warp, 0)
    upto = (of_warps - per_warp)[None, :, None] + tl.cumsum(each, 0)
    before = upto - each + tl.reshape((within[:, None] >> byte) & 0xFF, (PER_WARP, WARPS, WIDTH))
    before, upto = tl.permute(before, (2, 0, 1)), tl.permute(upto, (2, 0, 1))
    return tl.reshape(before, (WIDTH, LINES)), tl.reshape(upto, (WIDTH, LINES)), tl.max(of_warps, 0)


@triton.jit
@no_type_check
def _in_range(x, low, high):
    """Return whether low <= x < high."""
    here = x >= low
    if high is not None:
        here &= x < high
    return here


@triton.jit
@no_type_check
def find_cutoff(x, view, found, k, top_p, goal, mass_above, floor):
    """Return the cutoff among the first `found` of x [N] (−inf after them), and the mass kept of them, float64.

    Reference: core.filters._cut_sorted and core.filters._edge.

    If k is not 0, the k largest are kept and top-p applies to their mass; otherwise `goal` is the mass to reach, of
    which logits above all of these have `mass_above`. The cutoff is at least `floor`. Nothing is sorted: a logit is
    kept while the count and the mass of the logits above it, its rank, are small enough.

    Masses are integers here, in units of 2⁻³¹ of the peak's: a logit and its mass are exchanged between threads as one
    number, rank and mass are one sum, and the order of additions does not matter.
    """
    N: tl.constexpr = x.shape[0]
    there, own_key = x > float("-inf"), key(x + 0.0)  # −0 becomes 0
    w = tl.where(there, tl.exp((x - view.peak).to(tl.float64) * view.scale) * PEAK_MASS + 0.5, 0.0).to(tl.int64)
    both = (own_key.to(tl.int64) << 32) | w
    sums = tl.zeros([2, N], tl.int64)  # two sums side by side
    some = tl.arange(0, COMPARED)
    for n in range(0, found, COMPARED):
        other = tl.gather(both, n + some % 2 * (COMPARED // 2) + some // 2, 0)
        higher = (other >> 32).to(tl.int32)[:, None] > own_key[None, :]  # short axis first: it then lies in one thread
        one = tl.where(higher, ((other & 0xFFFFFFFF) | COUNT_ONE)[:, None], 0)
        sums += tl.sum(tl.reshape(one, (COMPARED // 2, 2, N)), 0)
    above = tl.sum(sums, 0)
    number, mass = (
        (above // COUNT_ONE).to(tl.int32),
        mass_above + (above % COUNT_ONE).to(tl.float64) * (1.0 / PEAK_MASS),
    )
    kept, limit = there, goal
    if k > 0:
        kept, limit = there & (number < k), tl.full((), float("inf"), tl.float64)
        if top_p < 1:
            limit = top_p * _sum(tl.where(kept, w, 0))
    edge = value(tl.min(tl.where(kept & (mass < limit), own_key, INF_KEY), 0))
    cutoff = tl.maximum(edge, floor)
    return cutoff, _sum(tl.where(x >= cutoff, w, 0))


@triton.jit
@no_type_check
def _sum(w):
    """Sum integer masses, float64, in two halves: 32-bit integers reduce in one instruction, 64-bit ones in five."""
    halves = tl.sum(tl.join((w >> 16).to(tl.int32), (w & 0xFFFF).to(tl.int32)), 0)
    high, low = tl.split(halves)
    return (high.to(tl.float64) * 65536.0 + low.to(tl.float64)) * (1.0 / PEAK_MASS)


@triton.jit
@no_type_check
def load_gathered(buffer, found, MOST: tl.constexpr):
    """Load the gathered logits [MOST]; −inf after the last."""
    n = tl.arange(0, MOST)
    return tl.load(buffer + n, mask=n < found, other=float("-inf"))


@triton.jit
@no_type_check
def load_gathered_slices(names, found, MOST: tl.constexpr):
    """Load the slices of the gathered logits [MOST], from `names`; NO_SLICE after the last."""
    n = tl.arange(0, MOST)
    return as_int(tl.load(names + n, mask=n < found, other=as_float(tl.full([MOST], NO_SLICE, tl.int32))))
