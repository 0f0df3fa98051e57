"""The logits among which a cutoff must lie, where they are few: gathered, ranked, and cut."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.cutoff import NOWHERE, as_float, as_whole, ask_parts
from draftproof.kernels.device.layout import SLICE
from draftproof.kernels.device.math import LOG2_E, key, near_exp2, value

PIVOTS = tl.constexpr(8)
MOST_STEPS = tl.constexpr(7)
MASS_PIVOTS = tl.constexpr(4)  # each takes an exponential
MASS_STEPS = tl.constexpr(3)  # a bound need not be tight
SLACK = tl.constexpr(1e-5)  # a bound must hold in spite of rounding
ALL = tl.constexpr(2**30)  # what stands for the mass of a row


@triton.jit
@no_type_check
def bound_count(m, peak, least, k):
    """A number that at least k logits reach: the largest of k slices each do. −inf where there are fewer slices.

    It is enough if not many more than k slices reach it.
    """
    NS: tl.constexpr = m.shape[0]
    line = tl.reshape(m, (1, NS))  # laid out as m is, so that each thread has the counts of all pivots
    low, high = least, peak
    enough, reached, n = peak >= least, k + k, 0
    one = enough.to(tl.int32)  # unknown to the compiler: it would count bits, and pack them first
    while enough & (reached > k + k // 4) & (n < MOST_STEPS):
        here = tl.sum(tl.where(line >= _pivots(low, high, PIVOTS)[:, None], one, 0), 1)
        count = tl.sum((here >= k).to(tl.int32), 0)
        reached = tl.min(tl.where(here >= k, here, NS), 0)
        enough = count > 0
        low, high = _between_pivots(low, high, count, PIVOTS)
        n += 1
    return tl.where(enough, low, float("-inf"))


@triton.jit
@no_type_check
def bound_mass(m, peak, least, mass, total, scale, goal):
    """A number that the cutoff of a nucleus of mass `goal`, relative to the peak's, does not lie under.

    A slice whose largest logit reaches v has at least that one's mass above v, and at least its whole mass less
    what the others can have below v. And all logits under v have at most the mass of so many v: as long as that is no
    more than what lies outside the nucleus, the cutoff is not under v.
    """
    total, scale, goal = total.to(tl.float32), scale.to(tl.float32), goal.to(tl.float32)
    NS: tl.constexpr = m.shape[0]
    unit, slope = 1.0 / total * ALL, scale * LOG2_E
    line = tl.reshape(m, (1, NS))
    top = (near_exp2((line - peak) * slope) * unit).to(tl.int32)
    mass = (tl.reshape(mass, (1, NS)) * unit).to(tl.int32)
    wanted = (goal * (1 + SLACK) * unit).to(tl.int32) + 1
    others = tl.log(unit * ((SLICE - 1) * (1 + SLACK))) * LOG2_E
    low, high, found = least, peak, peak < least
    for _ in range(MASS_STEPS):
        pivots = _pivots(low, high, MASS_PIVOTS)
        under = tl.minimum(near_exp2(tl.fma(pivots - peak, slope, others)), ALL).to(tl.int32) + 1
        least_mass = tl.maximum(top, mass - under[:, None])
        enough = tl.sum(tl.where(line >= pivots[:, None], least_mass, 0), 1) >= wanted
        count = tl.sum(enough.to(tl.int32), 0)
        found |= count > 0
        low, high = _between_pivots(low, high, count, MASS_PIVOTS)
    spare = total * (1 - SLACK) - goal * (1 + SLACK)
    even = peak + tl.log(tl.maximum(spare, 0.0) / (SLICE * NS)) / scale
    return tl.maximum(even - SLACK / scale, tl.where(found, low, float("-inf")))


@triton.jit
@no_type_check
def _pivots(low, high, COUNT: tl.constexpr):
    """Numbers from `low` on, at even distances."""
    return _pivot(low, high, tl.arange(0, COUNT), COUNT)


@triton.jit
@no_type_check
def _between_pivots(low, high, enough, COUNT: tl.constexpr):
    """The two of these, or `high`, between which the highest lies above which there is enough: for so many there is."""
    first = _pivot(low, high, tl.maximum(enough - 1, 0), COUNT)
    return first, tl.where(enough < COUNT, _pivot(low, high, enough, COUNT), high)


@triton.jit
@no_type_check
def _pivot(low, high, p, COUNT: tl.constexpr):
    return tl.where(p == 0, low, tl.fma(high - low, p.to(tl.float32) * (1.0 / COUNT), low))


SOME = tl.constexpr(32)  # logits that all others are compared with at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)  # that is not −inf
ONE = tl.constexpr(2**31)  # the peak's mass as a whole number
ANOTHER = tl.constexpr(2**40)  # counts above the sum of as many such masses as are ever ranked
WARPS = tl.constexpr(8)  # of a program, or as many as it is taken to have
NONE = tl.constexpr(0x7F800000)  # the key of +inf


@triton.jit
@no_type_check
def gather(batch, req, place, low, high, places, MOST: tl.constexpr, NAMED: tl.constexpr):
    """Write down the logits in [low, high) of a place's slices at `places`, MOST of them at most, slice by slice in
    order; NAMED: behind MOST places the slice of each as well. A `high` of None is no limit. Returns how many there
    are, of which none is missing if they are not more than MOST.

    A slice lies in one warp, which has EACH of them one behind the other: how many logits there are in each before a
    thread's own is then counted for all of them together, a byte for each.
    """
    EACH: tl.constexpr = 4 if batch.traits.EDITED or batch.traits.MASKED else 8
    LINES: tl.constexpr = EACH * WARPS
    line = tl.arange(0, LINES)
    low = tl.maximum(low, LOWEST)
    found = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the places may still be read
    for n in range(0, place.count, LINES):
        which, x = ask_parts(batch, req, place, n + line % WARPS * EACH + line // WARPS)
        bits = _between(x[0], low, high).to(tl.int32)
        for i in tl.static_range(1, len(x)):
            bits |= _between(x[i], low, high).to(tl.int32) << i
        before, upto, more = _places(bits, EACH)
        bits = tl.where(found + upto <= MOST, bits, 0)
        name = tl.broadcast_to(as_float(which)[None, :], bits.shape)
        at = found + before
        for i in tl.static_range(len(x)):
            here = (bits >> i) & 1
            tl.store(places + at, x[i], mask=here > 0)
            if NAMED:
                tl.store(places + at + MOST, name, mask=here > 0)
            at += here
        found += more
    tl.debug_barrier()
    return found


@triton.jit
@no_type_check
def _places(bits, EACH: tl.constexpr):
    """Of up to four bits at each place [width, lines], the lines of a warp one behind the other: how many are set
    before each place, and up to the end of its line; and in all."""
    WIDTH: tl.constexpr = bits.shape[0]
    WORDS: tl.constexpr = EACH // 4
    LINES: tl.constexpr = EACH * WARPS
    byte = (tl.arange(0, 4) * 8)[None, :, None, None]
    bits = tl.permute(tl.reshape(bits, (WIDTH, WORDS, 4, WARPS)), (1, 2, 3, 0))
    packed = tl.sum(bits << byte, 1)
    packed -= (packed >> 1) & 0x55555555
    packed = (packed & 0x33333333) + ((packed >> 2) & 0x33333333)  # bits are counted
    within = tl.cumsum(packed, 2) - packed
    all_of = tl.sum(packed, 2)
    each = ((all_of[:, :, None] + tl.zeros([1, 1, WIDTH], tl.int32))[:, None] >> byte) & 0xFF
    each = tl.reshape(each, (EACH, WARPS, WIDTH))
    pairs = (all_of & 0xFF00FF) + ((all_of >> 8) & 0xFF00FF)
    mine = tl.sum((pairs & 0xFFFF) + (pairs >> 16), 0)
    of_warps = tl.cumsum(mine, 0)
    upto = (of_warps - mine)[None, :, None] + tl.cumsum(each, 0)
    before = upto - each + tl.reshape((within[:, None] >> byte) & 0xFF, (EACH, WARPS, WIDTH))
    before, upto = tl.permute(before, (2, 0, 1)), tl.permute(upto, (2, 0, 1))
    return tl.reshape(before, (WIDTH, LINES)), tl.reshape(upto, (WIDTH, LINES)), tl.max(of_warps, 0)


@triton.jit
@no_type_check
def _between(x, low, high):
    here = x >= low
    if high is not None:
        here &= x < high
    return here


@triton.jit
@no_type_check
def cut(x, place, found, k, top_p, goal, mass_above, floor):
    """Twin: `filters._cut_sorted` and `filters._edge`. The cutoff among the first `found` of x [N]; −inf behind them.

    Where k is not 0 the k-th largest of them ends the kept ones and top-p is of their mass; otherwise `goal` is the
    mass to reach, of which logits that lie higher than all of these have `mass_above`. Nothing is sorted: a logit is
    kept as long as those above it, whose number and mass are its rank, are too few. Not under `floor`. Returns the
    mass, float64, of what is kept of them as well.

    Masses are whole numbers here, of 2⁻³¹ of the peak's: a logit and its mass are then passed from thread to thread as
    one number, rank and mass are one sum, and no order of additions matters.
    """
    N: tl.constexpr = x.shape[0]
    there, mine = x > float("-inf"), key(x + 0.0)  # −0 is 0
    w = tl.where(there, tl.exp((x - place.peak).to(tl.float64) * place.scale) * ONE + 0.5, 0.0).to(tl.int64)
    both = (mine.to(tl.int64) << 32) | w
    sums = tl.zeros([2, N], tl.int64)  # two side by side
    some = tl.arange(0, SOME)
    for n in range(0, found, SOME):
        other = tl.gather(both, n + some % 2 * (SOME // 2) + some // 2, 0)
        higher = (other >> 32).to(tl.int32)[:, None] > mine[None, :]  # the short axis first: most of it is one thread's
        one = tl.where(higher, ((other & 0xFFFFFFFF) | ANOTHER)[:, None], 0)
        sums += tl.sum(tl.reshape(one, (SOME // 2, 2, N)), 0)
    above = tl.sum(sums, 0)
    number, mass = (above // ANOTHER).to(tl.int32), mass_above + (above % ANOTHER).to(tl.float64) * (1.0 / ONE)
    kept, limit = there, goal
    if k > 0:
        kept, limit = there & (number < k), tl.full((), float("inf"), tl.float64)
        if top_p < 1:
            limit = top_p * _sum(tl.where(kept, w, 0))
    edge = value(tl.min(tl.where(kept & (mass < limit), mine, NONE), 0))
    cutoff = tl.maximum(edge, floor)
    return cutoff, _sum(tl.where(x >= cutoff, w, 0))


@triton.jit
@no_type_check
def _sum(w):
    """Of such masses, float64. In two halves: numbers of 32 bits are added up in one step, longer ones in five."""
    halves = tl.sum(tl.join((w >> 16).to(tl.int32), (w & 0xFFFF).to(tl.int32)), 0)
    high, low = tl.split(halves)
    return (high.to(tl.float64) * 65536.0 + low.to(tl.float64)) * (1.0 / ONE)


@triton.jit
@no_type_check
def listed(places, found, MOST: tl.constexpr):
    """The gathered logits, [MOST]; −inf behind the last."""
    n = tl.arange(0, MOST)
    return tl.load(places + n, mask=n < found, other=float("-inf"))


@triton.jit
@no_type_check
def listed_slices(names, found, MOST: tl.constexpr):
    """Their slices, where these were written down at `names`; NOWHERE behind the last."""
    n = tl.arange(0, MOST)
    return as_whole(tl.load(names + n, mask=n < found, other=as_float(tl.full([MOST], NOWHERE, tl.int32))))
