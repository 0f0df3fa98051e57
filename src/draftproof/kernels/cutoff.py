"""What a search for a cutoff reads: the slices of a row that may hold it, in a list; and the row's sums above it."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import PER_CHUNK, QUEUE, SLICE, WORK
from draftproof.kernels.request import chunks_of, law_row, request, whole
from draftproof.kernels.rows import dressed, law_slices

NOWHERE = tl.constexpr(2**30 + SLICE.value)  # a slice that begins here is behind the end of any row


class Place(NamedTuple):
    """A law row: its number among the request's; which of its slices are read, `count` from the `first` on of all
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
    """A law row's own memory (`draftproof.kernels.layout`)."""
    return batch.work + line * (chunks_of(batch) * PER_CHUNK + WORK)


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
    reach = (m >= low) & (m > float("-inf"))
    n = tl.cumsum(reach.to(tl.int32), 0) - 1
    names = tl.arange(0, batch.traits.NS).to(tl.float32)
    tl.store(line_of_work(batch, law_row(req, row)) + WORK + n, names, mask=reach)
    tl.debug_barrier()
    return tl.sum(reach.to(tl.int32), 0)


@triton.jit
@no_type_check
def ask(batch, req, place, n):
    """Of a place's slices the n-th [L]: their numbers, -1 behind the end, and their logits as they are."""
    there = n < place.count
    n += place.first
    listed = line_of_work(batch, law_row(req, place.row)) + WORK
    which = tl.load(listed + n, mask=there & (place.listed > 0), other=-1.0).to(tl.int32)
    which = tl.where(there & (place.listed == 0), n, which)
    return which, law_slices(batch, req, place.row, _begin(which), place.row >= 0)


@triton.jit
@no_type_check
def answer(batch, req, place, which, x):
    """What was asked for, [L, SEGMENT, parts], float32, edits and mask put in; −inf behind the end."""
    return dressed(batch, req, place.row, _begin(which), x)


@triton.jit
@no_type_check
def _begin(which):
    return tl.where(which >= 0, which * SLICE, NOWHERE)


@triton.jit
@no_type_check
def masked_sums(batch, req, place, begin, end, cutoff, LINES: tl.constexpr):
    """Put the sums of the slices from `begin` to `end` right, and of their chunks: only what reaches the cutoff counts,
    relative to the peak. The place's slices must be all of them that hold such a logit.

    Returns their total.
    """
    C = req.C
    line = law_row(req, place.row) * 2 * C
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
        tl.store(sums + which, each, mask=which >= 0)
        which, raw = ahead
    tl.debug_barrier()
    c = begin // PER_CHUNK + tl.arange(0, batch.traits.NP)
    part = c[:, None] * PER_CHUNK + tl.arange(0, PER_CHUNK)[None, :]
    s = tl.sum(tl.load(sums + part, mask=part < end, other=0.0), 1)
    there = c * PER_CHUNK < end
    tl.store(batch.stats + line + c, place.peak + tl.zeros([batch.traits.NP], tl.float32), mask=there)
    tl.store(batch.stats + line + C + c, s, mask=there)
    return tl.sum(s.to(tl.float64), 0)
