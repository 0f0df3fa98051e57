"""Read the slices of a row that may hold its cutoff, and recompute the row's sums above the cutoff.

Shared by the searches in `topk_topp`, `shortlist` and `nucleus_search`.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import PART_SUMS, PER_CHUNK, QUEUE_ENTRY, SLICE, WORK
from draftproof.kernels.device.math import INTERPRETED, add_to, fast_exp2, in_grains, power, slope_of, zero_sums
from draftproof.kernels.device.rows import chunks_of, dist_parts, dist_row, dist_slices, int_size, request, with_edits

LINES = tl.constexpr(32)  # slices that a search loads at a time
NO_SLICE = tl.constexpr(2**30 // SLICE.value + 1)  # id of a slice after the end of any row


class SliceView(NamedTuple):
    """The slices of one distribution row that a search reads.

    row     index among the request's distribution rows
    first   first slice read
    count   number of slices read
    listed  1: `first` and `count` refer to the row's list of slices; 0: to all its slices
    peak    largest logit of the row
    scale   1 / temperature
    """

    row: Any
    first: Any
    count: Any
    listed: Any
    peak: Any
    scale: Any


@triton.jit
@no_type_check
def work_at(batch, line):
    """Return the pointer to a distribution row's line of Workspace.work."""
    return batch.work + line * (chunks_of(batch) * PER_CHUNK + WORK)


@triton.jit
@no_type_check
def parts_at(batch, line):
    """Return the pointer to a distribution row's line of Workspace.part_sums."""
    return batch.part_sums + line * PART_SUMS


@triton.jit
@no_type_check
def queued_row(batch, n):
    """Return the request of the n-th queued row, and the row's index in it."""
    line = tl.load(work_at(batch, n.to(tl.int64)) + QUEUE_ENTRY).to(tl.int64)
    rows = 2 * int_size(batch.sizes.K) + 1
    return request(batch, line // rows), (line % rows).to(tl.int32)


@triton.jit
@no_type_check
def list_slices(batch, req, row, m, low):
    """Write the list of slices whose largest logit reaches `low`, in order; return their number."""
    THREADS: tl.constexpr = batch.traits.NS // 4  # each counts four slices
    reach = ((m >= low) & (m > float("-inf"))).to(tl.int32)
    even, odd = tl.split(tl.reshape(reach, (THREADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    upto = tl.cumsum(first + second + third + fourth, 0)
    name = tl.arange(0, THREADS) * 4
    at = work_at(batch, dist_row(req, row)) + WORK + upto
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
    """Reinterpret an integer as float32 bits; cheaper than a conversion."""
    return n.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def as_int(x):
    """Reinterpret float32 bits as an integer."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
@no_type_check
def last_of(x):
    """Return the last of x [N], integers that do not decrease."""
    return tl.max(tl.gather(x, tl.full([1], x.shape[0] - 1, tl.int32), 0), 0)


@triton.jit
@no_type_check
def load_slices(batch, req, view, n):
    """Load the n-th [L] slices of a view: their ids, NO_SLICE after the end, and their raw logits."""
    which = _slice_ids(batch, req, view, n)
    return which, dist_slices(batch, req, view.row, which * SLICE, view.row >= 0)


@triton.jit
@no_type_check
def load_parts(batch, req, view, n):
    """Load the n-th [L] slices of a view: their ids and their logits part by part (`rows.dist_parts`)."""
    which = _slice_ids(batch, req, view, n)
    return which, dist_parts(batch, req, view.row, which * SLICE)


@triton.jit
@no_type_check
def _slice_ids(batch, req, view, n):
    """Return the ids of the n-th slices of a view; NO_SLICE after the end."""
    there = n < view.count
    n += view.first
    listed = work_at(batch, dist_row(req, view.row)) + WORK
    nowhere = as_float(tl.full(there.shape, NO_SLICE, tl.int32))
    which = as_int(tl.load(listed + n, mask=there & (view.listed > 0), other=nowhere))
    return tl.where(there & (view.listed == 0), n, which)


@triton.jit
@no_type_check
def edited_slices(batch, req, view, which, x):
    """Return loaded slices [L, SEGMENT, parts] as float32 with edits and mask applied; −inf after the end."""
    return with_edits(batch, req, view.row, which * SLICE, x)


@triton.jit
@no_type_check
def filter_sums(batch, req, view, begin, end, cutoff, LINES: tl.constexpr):
    """Recompute the sums of the slices from `begin` to `end` and of their chunks, counting only logits >= cutoff.

    Sums are relative to the peak. The view must contain every slice that has such a logit. Returns the total.
    """
    C = req.C
    line = dist_row(req, view.row) * 2 * C
    sums = batch.slice_stats + line * PER_CHUNK
    n = begin + tl.arange(0, batch.traits.NS)
    tl.debug_barrier()  # the scan's sums may still be read
    tl.store(sums + n, view.peak + tl.zeros([batch.traits.NS], tl.float32), mask=n < end)
    sums += C * PER_CHUNK
    tl.store(sums + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < end)
    tl.debug_barrier()
    lines = tl.arange(0, LINES)
    which, raw = load_slices(batch, req, view, lines)
    for first in range(0, view.count, LINES):
        ahead = load_slices(batch, req, view, first + LINES + lines)
        x = edited_slices(batch, req, view, which, raw)
        mass = power(x - view.peak, slope_of(view.scale))
        each = tl.sum(tl.sum(tl.where(x >= cutoff, mass, 0.0), 2), 1)
        tl.store(sums + which, each, mask=which < NO_SLICE)
        which, raw = ahead
    tl.debug_barrier()
    c = begin // PER_CHUNK + tl.arange(0, batch.traits.NP)
    part = c[:, None] * PER_CHUNK + tl.arange(0, PER_CHUNK)[None, :]
    s = tl.sum(tl.load(sums + part, mask=part < end, other=0.0), 1)
    there = c * PER_CHUNK < end
    tl.store(batch.chunk_stats + line + c, view.peak + tl.zeros([batch.traits.NP], tl.float32), mask=there)
    tl.store(batch.chunk_stats + line + C + c, s, mask=there)
    return tl.sum(s.to(tl.float64), 0)


@triton.jit
@no_type_check
def clear_sums(batch, req, row):
    """Set a row's sums by slice and chunk to 0; their largest logits stay, as they have no weight."""
    C = req.C
    line = dist_row(req, row) * 2 * C
    n, c = tl.arange(0, batch.traits.NS), tl.arange(0, batch.traits.NP)
    count = C * PER_CHUNK
    tl.store(batch.slice_stats + line * PER_CHUNK + count + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < count)
    tl.store(batch.chunk_stats + line + C + c, tl.zeros([batch.traits.NP], tl.float32), mask=c < C)


@triton.jit
@no_type_check
def write_sums(batch, req, view, x, which, next_which, cutoff):
    """Write the sums of a cleared row from all its logits x [N] that reach the cutoff.

    `which`: the slice of each logit, ascending, NO_SLICE for none; `next_which`: the slice of the logit after it.
    """
    C = req.C
    line = dist_row(req, view.row) * 2 * C
    mass = tl.where(x >= cutoff, power(x - view.peak, slope_of(view.scale)), 0.0)
    _, one, all_four = tl.associative_scan((which, mass, mass), 0, _segmented_add)
    peak = view.peak + tl.zeros(x.shape, tl.float32)
    tl.debug_barrier()  # wait for the sums to be cleared
    end = (which < NO_SLICE) & (which != next_which)
    slices = batch.slice_stats + line * PER_CHUNK + which
    tl.store(slices, peak, mask=end)
    tl.store(slices + C * PER_CHUNK, one, mask=end)
    chunk = which // PER_CHUNK
    end = (which < NO_SLICE) & (chunk != next_which // PER_CHUNK)
    tl.store(batch.chunk_stats + line + chunk, peak, mask=end)
    tl.store(batch.chunk_stats + line + C + chunk, all_four, mask=end)


@triton.jit
@no_type_check
def _segmented_add(slice_a, one_a, all_a, slice_b, one_b, all_b):
    """Combine running sums that restart at each new slice and at each new chunk."""
    one = one_b + tl.where(slice_a == slice_b, one_a, 0.0)
    return slice_b, one, all_b + tl.where(slice_a // PER_CHUNK == slice_b // PER_CHUNK, all_a, 0.0)


SAMPLE = tl.constexpr(32)  # slices in a sample
SAMPLE_STEPS = tl.constexpr(6)  # steps of the search in a sample; four borders per step take as long as one
NEGLIGIBLE = tl.constexpr(60.0)  # exponents below the peak under which mass is negligible


@triton.jit
@no_type_check
def weights(x, view, by_mass):
    """Return the weights of logits x: their mass relative to the peak if by_mass, else 1 for each finite logit."""
    slope = slope_of(view.scale)
    offset = view.peak * slope
    correction = tl.exp2(tl.fma(-view.peak, slope, offset))  # for the rounding of the offset
    return tl.where(by_mass, fast_exp2(tl.fma(x, slope, -offset)) * correction, tl.where(x > float("-inf"), 1.0, 0.0))


@triton.jit
@no_type_check
def search_bottom(view, low):
    """Return the logit at which a search starts: `low`, or the logit below which mass is negligible."""
    return tl.maximum(low, view.peak - NEGLIGIBLE / view.scale.to(tl.float32))


@triton.jit
@no_type_check
def sampled_cutoff(batch, req, view, low, goal, by_mass, total):
    """Estimate the cutoff from SAMPLE slices, as if all slices were like these.

    For masses the sums below are used: the mass above lies in few logits, which a sample may miss.
    """
    every = tl.maximum(view.count.to(tl.float32) / SAMPLE, 1.0)
    _, x = load_parts(batch, req, view, (tl.arange(0, SAMPLE) * every).to(tl.int32))
    w = ()
    for i in tl.static_range(len(x)):
        w += (weights(x[i], view, by_mass),)
    low, high = search_bottom(view, low), view.peak
    for _ in range(SAMPLE_STEPS):
        apart = (high - low) * 0.2
        one = tl.join(_sum_side(x, w, low + apart, by_mass), _sum_side(x, w, low + 2 * apart, by_mass))
        other = tl.join(_sum_side(x, w, low + 3 * apart, by_mass), _sum_side(x, w, low + 4 * apart, by_mass))
        part = tl.sum(tl.join(one, other), 0) * every
        enough = tl.where(by_mass, total - part, part.to(tl.float64)) >= goal
        count = tl.sum(tl.sum(enough.to(tl.int32), 1), 0)  # sums of the same logits are monotone in the border
        low += count * apart
        high = tl.minimum(high, low + apart)
    return low


@triton.jit
@no_type_check
def _sum_side(x, w, border, by_mass):
    """Sum the weights on one side of a border, per thread: masses below it, counts above it."""
    sums = tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(len(x)):
        sums += tl.where((x[i] >= border) == by_mass, 0.0, w[i])
    return tl.reshape(sums, (x[0].shape[0] * x[0].shape[1],))


@triton.jit
@no_type_check
def measure(batch, req, view, borders, by_mass, most):
    """Return how much mass (or how many logits) reaches each of `borders` [P], in grains of `most`.

    No sum exceeds `most` (`draftproof.kernels.device.math`). One pass over the slices of a view that begins at a
    multiple of LINES. Each thread sums its own logits; only the last sums are exchanged between threads. The few logits
    that a thread adds in float32 before the conversion to integers are the same wherever the view begins and ends.
    """
    P: tl.constexpr = borders.shape[0]
    N: tl.constexpr = LINES * SLICE
    lines = tl.arange(0, LINES)
    sums = zero_sums(P, N // 8)
    which, raw = load_slices(batch, req, view, lines)
    for n in range(0, view.count, LINES):
        ahead = load_slices(batch, req, view, n + LINES + lines)
        x = tl.reshape(edited_slices(batch, req, view, which, raw), (1, N // 8, 2, 2, 2))
        here = tl.zeros([P, N // 8], tl.float32)
        eight = _halves(_halves(_halves((x,))))  # one thread holds all eight, for all borders
        for i in tl.static_range(8):
            here = _add_where(here, eight[i], borders[:, None], weights(eight[i], view, by_mass))
        sums = add_to(sums, here, most)
        which, raw = ahead
    return in_grains(sums)


@triton.jit
@no_type_check
def _halves(tensors):
    """Split the last axis of each tensor in two."""
    halves = ()
    for i in tl.static_range(len(tensors)):
        one, other = tl.split(tensors[i])
        halves += (one, other)
    return halves


@triton.jit
@no_type_check
def _add_where(sums, x, border, w):
    """Add w to the sums where x >= border: two instructions, where the compiler takes three."""
    if INTERPRETED:
        return tl.where(x >= border, sums + w, sums)
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.f32 p, $2, $3; mov.f32 $0, $1; @p add.f32 $0, $0, $4; }",
            "=f,f,f,f,f", [sums, x, border, w], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
