"""What a search for a cutoff reads: the slices of a row that may hold it, in a list; and the row's sums above it."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import MEASURED, PER_CHUNK, QUEUE, SLICE, WORK
from draftproof.kernels.device.math import INTERPRETED, add_to, in_grains, near_exp2, no_sums, power, slope_of
from draftproof.kernels.device.rows import chunks_of, dist_parts, dist_row, dist_slices, dressed, request, whole

LINES = tl.constexpr(32)  # slices that a search asks for at a time
NOWHERE = tl.constexpr(2**30 // SLICE.value + 1)  # a slice that is behind the end of any row


class Place(NamedTuple):
    """A distribution row: its number among the request's; which of its slices are read, `count` from the `first` on of all
    (listed = 0) or of those that stand in its list (listed = 1); its largest logit, its scale."""

    row: Any
    first: Any
    count: Any
    listed: Any
    peak: Any
    scale: Any


@triton.jit
@no_type_check
def line_of_work(batch, line):
    """A distribution row's own memory (`draftproof.kernels.device.layout`)."""
    return batch.work + line * (chunks_of(batch) * PER_CHUNK + WORK)


@triton.jit
@no_type_check
def line_of_parts(batch, line):
    """What was measured of it, and found in its parts."""
    return batch.parts + line * MEASURED


@triton.jit
@no_type_check
def queued_row(batch, n):
    """The n-th row that `settle` has left in its queue: its request, and its number among the request's."""
    line = tl.load(line_of_work(batch, n.to(tl.int64)) + QUEUE).to(tl.int64)
    rows = 2 * whole(batch.sizes.K) + 1
    return request(batch, line // rows), (line % rows).to(tl.int32)


@triton.jit
@no_type_check
def list_slices(batch, req, row, m, low):
    """Write down the slices whose largest logit reaches `low`, in order. Returns how many."""
    THREADS: tl.constexpr = batch.traits.NS // 4  # each counts four of them by itself
    reach = ((m >= low) & (m > float("-inf"))).to(tl.int32)
    even, odd = tl.split(tl.reshape(reach, (THREADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    upto = tl.cumsum(first + second + third + fourth, 0)
    name = tl.arange(0, THREADS) * 4
    at = line_of_work(batch, dist_row(req, row)) + WORK + upto
    tl.store(at - fourth, as_float(name + 3), mask=fourth > 0)
    at -= fourth + third
    tl.store(at, as_float(name + 2), mask=third > 0)
    tl.store(at - second, as_float(name + 1), mask=second > 0)
    tl.store(at - second - first, as_float(name), mask=first > 0)
    tl.debug_barrier()
    return last_of(upto)


@triton.jit
@no_type_check
def as_float(n):
    """A whole number in the memory of a float32, as it is: to turn it into one takes longer."""
    return n.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def as_whole(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
@no_type_check
def last_of(x):
    """The last of x [N], whole numbers that do not fall."""
    return tl.max(tl.gather(x, tl.full([1], x.shape[0] - 1, tl.int32), 0), 0)


@triton.jit
@no_type_check
def ask(batch, req, place, n):
    """Of a place's slices the n-th [L]: their numbers, NOWHERE behind the end, and their logits as they are."""
    which = _which(batch, req, place, n)
    return which, dist_slices(batch, req, place.row, which * SLICE, place.row >= 0)


@triton.jit
@no_type_check
def ask_parts(batch, req, place, n):
    """The same numbers, and the logits part by part (`rows.law_parts`)."""
    which = _which(batch, req, place, n)
    return which, dist_parts(batch, req, place.row, which * SLICE)


@triton.jit
@no_type_check
def _which(batch, req, place, n):
    there = n < place.count
    n += place.first
    listed = line_of_work(batch, dist_row(req, place.row)) + WORK
    nowhere = as_float(tl.full(there.shape, NOWHERE, tl.int32))
    which = as_whole(tl.load(listed + n, mask=there & (place.listed > 0), other=nowhere))
    return tl.where(there & (place.listed == 0), n, which)


@triton.jit
@no_type_check
def answer(batch, req, place, which, x):
    """What was asked for, [L, SEGMENT, parts], float32, edits and mask put in; −inf behind the end."""
    return dressed(batch, req, place.row, which * SLICE, x)


@triton.jit
@no_type_check
def masked_sums(batch, req, place, begin, end, cutoff, LINES: tl.constexpr):
    """Put the sums of the slices from `begin` to `end` right, and of their chunks: only what reaches the cutoff counts,
    relative to the peak. The place's slices must be all of them that hold such a logit.

    Returns their total.
    """
    C = req.C
    line = dist_row(req, place.row) * 2 * C
    sums = batch.slices + line * PER_CHUNK
    n = begin + tl.arange(0, batch.traits.NS)
    tl.debug_barrier()  # the scan's may still be read
    tl.store(sums + n, place.peak + tl.zeros([batch.traits.NS], tl.float32), mask=n < end)
    sums += C * PER_CHUNK
    tl.store(sums + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < end)
    tl.debug_barrier()
    lines = tl.arange(0, LINES)
    which, raw = ask(batch, req, place, lines)
    for first in range(0, place.count, LINES):
        ahead = ask(batch, req, place, first + LINES + lines)
        x = answer(batch, req, place, which, raw)
        mass = power(x - place.peak, slope_of(place.scale))
        each = tl.sum(tl.sum(tl.where(x >= cutoff, mass, 0.0), 2), 1)
        tl.store(sums + which, each, mask=which < NOWHERE)
        which, raw = ahead
    tl.debug_barrier()
    c = begin // PER_CHUNK + tl.arange(0, batch.traits.NP)
    part = c[:, None] * PER_CHUNK + tl.arange(0, PER_CHUNK)[None, :]
    s = tl.sum(tl.load(sums + part, mask=part < end, other=0.0), 1)
    there = c * PER_CHUNK < end
    tl.store(batch.stats + line + c, place.peak + tl.zeros([batch.traits.NP], tl.float32), mask=there)
    tl.store(batch.stats + line + C + c, s, mask=there)
    return tl.sum(s.to(tl.float64), 0)


@triton.jit
@no_type_check
def clear_sums(batch, req, row):
    """Leave nothing of a row's sums by slice and chunk. Their largest logits may stay: they weigh nothing."""
    C = req.C
    line = dist_row(req, row) * 2 * C
    n, c = tl.arange(0, batch.traits.NS), tl.arange(0, batch.traits.NP)
    count = C * PER_CHUNK
    tl.store(batch.slices + line * PER_CHUNK + count + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < count)
    tl.store(batch.stats + line + C + c, tl.zeros([batch.traits.NP], tl.float32), mask=c < C)


@triton.jit
@no_type_check
def write_sums(batch, req, place, x, which, behind, cutoff):
    """The sums of a row that were cleared, made of all its logits x [N] that reach the cutoff: `which` slices they are
    in, rising, NOWHERE for none, and which those behind them are in."""
    C = req.C
    line = dist_row(req, place.row) * 2 * C
    mass = tl.where(x >= cutoff, power(x - place.peak, slope_of(place.scale)), 0.0)
    _, one, all_four = tl.associative_scan((which, mass, mass), 0, _of_same)
    peak = place.peak + tl.zeros(x.shape, tl.float32)
    tl.debug_barrier()  # they are cleared
    end = (which < NOWHERE) & (which != behind)
    slices = batch.slices + line * PER_CHUNK + which
    tl.store(slices, peak, mask=end)
    tl.store(slices + C * PER_CHUNK, one, mask=end)
    chunk = which // PER_CHUNK
    end = (which < NOWHERE) & (chunk != behind // PER_CHUNK)
    tl.store(batch.stats + line + chunk, peak, mask=end)
    tl.store(batch.stats + line + C + chunk, all_four, mask=end)


@triton.jit
@no_type_check
def _of_same(slice_a, one_a, all_a, slice_b, one_b, all_b):
    """Sums that go on as long as slice and chunk are the same."""
    one = one_b + tl.where(slice_a == slice_b, one_a, 0.0)
    return slice_b, one, all_b + tl.where(slice_a // PER_CHUNK == slice_b // PER_CHUNK, all_a, 0.0)


SAMPLE = tl.constexpr(32)  # slices
STEPS = tl.constexpr(6)  # of a search in a sample: four numbers are tried at a time, which takes as long as one
FAR = tl.constexpr(60.0)  # exponents under the peak: what lies further down is rarely looked for


@triton.jit
@no_type_check
def weights(x, place, by_mass):
    """What counts of logits x: their masses relative to the peak's, or that they are."""
    slope = slope_of(place.scale)
    offset = place.peak * slope
    made_up = tl.exp2(tl.fma(-place.peak, slope, offset))  # for the rounding of the offset
    return tl.where(by_mass, near_exp2(tl.fma(x, slope, -offset)) * made_up, tl.where(x > float("-inf"), 1.0, 0.0))


@triton.jit
@no_type_check
def bottom_of(place, low):
    """A number to look from: `low`, or what has no mass to speak of."""
    return tl.maximum(low, place.peak - FAR / place.scale.to(tl.float32))


@triton.jit
@no_type_check
def sampled(batch, req, place, low, goal, by_mass, total):
    """Where the goal would be if all slices were like SAMPLE of them.

    Of masses those below are summed: what lies above is in few logits, which a sample may miss.
    """
    every = tl.maximum(place.count.to(tl.float32) / SAMPLE, 1.0)
    _, x = ask_parts(batch, req, place, (tl.arange(0, SAMPLE) * every).to(tl.int32))
    w = ()
    for i in tl.static_range(len(x)):
        w += (weights(x[i], place, by_mass),)
    low, high = bottom_of(place, low), place.peak
    for _ in range(STEPS):
        apart = (high - low) * 0.2
        one = tl.join(_counted(x, w, low + apart, by_mass), _counted(x, w, low + 2 * apart, by_mass))
        other = tl.join(_counted(x, w, low + 3 * apart, by_mass), _counted(x, w, low + 4 * apart, by_mass))
        part = tl.sum(tl.join(one, other), 0) * every
        enough = tl.where(by_mass, total - part, part.to(tl.float64)) >= goal
        count = tl.sum(tl.sum(enough.to(tl.int32), 1), 0)  # sums of the same logits rise and fall together
        low += count * apart
        high = tl.minimum(high, low + apart)
    return low


@triton.jit
@no_type_check
def _counted(x, w, border, by_mass):
    """What counts of weights on this side of a border, by thread: of masses below, of numbers above."""
    sums = tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(len(x)):
        sums += tl.where((x[i] >= border) == by_mass, 0.0, w[i])
    return tl.reshape(sums, (x[0].shape[0] * x[0].shape[1],))


@triton.jit
@no_type_check
def measured(batch, req, place, borders, by_mass, most):
    """How much reaches each of `borders` [P], in grains of `most` (`draftproof.kernels.device.math`), which no sum exceeds.
    One pass over the slices of a place that begins at a multiple of LINES.

    Each thread adds up its own logits, and only the last sums cross from thread to thread. The few that it adds up
    before they are made whole numbers are the same wherever the place begins and ends.
    """
    P: tl.constexpr = borders.shape[0]
    N: tl.constexpr = LINES * SLICE
    lines = tl.arange(0, LINES)
    sums = no_sums(P, N // 8)
    which, raw = ask(batch, req, place, lines)
    for n in range(0, place.count, LINES):
        ahead = ask(batch, req, place, n + LINES + lines)
        x = tl.reshape(answer(batch, req, place, which, raw), (1, N // 8, 2, 2, 2))
        here = tl.zeros([P, N // 8], tl.float32)
        eight = _halves(_halves(_halves((x,))))  # a thread's own: it has them for all borders then
        for i in tl.static_range(8):
            here = _add_where(here, eight[i], borders[:, None], weights(eight[i], place, by_mass))
        sums = add_to(sums, here, most)
        which, raw = ahead
    return in_grains(sums)


@triton.jit
@no_type_check
def _halves(tensors):
    halves = ()
    for i in tl.static_range(len(tensors)):
        one, other = tl.split(tensors[i])
        halves += (one, other)
    return halves


@triton.jit
@no_type_check
def _add_where(sums, x, border, w):
    """The sums, with weights added where x reaches the border: in two instructions, where the compiler takes three."""
    if INTERPRETED:
        return tl.where(x >= border, sums + w, sums)
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.f32 p, $2, $3; mov.f32 $0, $1; @p add.f32 $0, $0, $4; }",
            "=f,f,f,f,f", [sums, x, border, w], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
