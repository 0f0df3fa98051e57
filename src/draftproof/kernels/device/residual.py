"""The residual's sums by chunk, of max(0, w·p − q): for these rows of logits are read again, as fast as they come."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.cutoff import NOWHERE
from draftproof.kernels.draws import tokens_of
from draftproof.kernels.exponent import LOG2_E, near_exp2, power
from draftproof.kernels.laws import draft_line_of, excess, written_numbers
from draftproof.kernels.layout import PER_CHUNK, SLICE, WEIGHT
from draftproof.kernels.numbers import line_of
from draftproof.kernels.request import law_row
from draftproof.kernels.rows import draft_row, target_row, whole_slices


@triton.jit
@no_type_check
def excess_sums(batch, req, at, c):
    """Where the residual's chunk sums stand: with the draft row, whose own sums are no longer needed."""
    return batch.stats + (law_row(req, req.J + at) * 2 + 1) * req.C + c


@triton.jit
@no_type_check
def sum_excess(batch, req, at, p_law, q_law, weight, first, stride, CHUNKS: tl.constexpr):
    """Twin: `draw.chunk_sums` of `chain.excess`, written down: of pieces of CHUNKS chunks, the first-th and then every
    stride-th. Of whatever there may be: edits, masks, another vocabulary, a draft that was chosen."""
    drafted = tl.load(batch.drafted + req.b * req.K + at)
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        o = tokens_of(_slices(n, CHUNKS))
        each = excess(batch, req, at, drafted, p_law, q_law, weight, 1.0, o)
        _write_sums(batch, req, at, n, tl.sum(each, 1), CHUNKS)


@triton.jit
@no_type_check
def sum_written(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """The same of laws that are written down, and faster of logits that are as they are, which is how most are."""
    AS_THEY_ARE: tl.constexpr = not (batch.traits.EDITED or batch.traits.MASKED or batch.traits.MAPPED)
    if batch.traits.ALIKE and AS_THEY_ARE:
        if req.draft_temperature > 0:
            _sum_plain(batch, req, at, first, stride, CHUNKS)
        else:
            _sum_others(batch, req, at, first, stride, CHUNKS)
    else:
        _sum_others(batch, req, at, first, stride, CHUNKS)


@triton.jit
@no_type_check
def _sum_others(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    p_law, q_law = written_laws(batch, req, at, at >= 0)
    sum_excess(batch, req, at, p_law, q_law, _weight(batch, req, at), first, stride, CHUNKS)


@triton.jit
@no_type_check
def written_laws(batch, req, node, there):
    """What is written down of nodes' rows. Cutoffs that were handed over stand there without any filter as well."""
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    q_law = written_numbers(draft_line_of(batch, req, node), there, CUT_Q)
    return written_numbers(line_of(batch, req, node), there, batch.traits.FILTERED), q_law


@triton.jit
@no_type_check
def _weight(batch, req, node):
    return power(tl.load(line_of(batch, req, node) + WEIGHT).to(tl.float32), LOG2_E)


@triton.jit
@no_type_check
def _sum_plain(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """Every row is read in long pieces, the first of which are on their way before the laws are asked for."""
    x, y = _piece(batch, req, at, first, CHUNKS)
    p_law, q_law = written_laws(batch, req, at, at >= 0)
    p, q = _proportion(p_law), _proportion(q_law)
    less = -(_weight(batch, req, at) * p.gain / q.gain)  # the sums, not each q, are then put right by its gain
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        here, there = _power(x.to(tl.float32), p, batch.traits.FILTERED), _power(y.to(tl.float32), q, CUT_Q)
        missing = tl.minimum(tl.fma(here, less, there), 0.0)  # of negative sign: to change it costs a step for each
        _write_sums(batch, req, at, n, -tl.sum(tl.sum(missing, 2), 1) * q.gain, CHUNKS)
        x, y = _piece(batch, req, at, n + stride, CHUNKS)


@triton.jit
@no_type_check
def _piece(batch, req, at, n, CHUNKS: tl.constexpr):
    """Logits of both rows in piece n, of which there may be none."""
    begin = _slices(n, CHUNKS) * SLICE
    if batch.traits.FILTERED:  # where p has nothing, no more is missing: of most slices, which are not read
        begin = tl.where(_has_mass(batch, req, at, _slices(n, CHUNKS)), begin, NOWHERE * SLICE)
    x = whole_slices(target_row(batch, req, at), begin, batch.sizes.V, batch.traits.SEGMENT)
    return x, whole_slices(draft_row(batch, req, at), begin, batch.sizes.R, batch.traits.SEGMENT)


@triton.jit
@no_type_check
def _has_mass(batch, req, at, which):
    """Whether p gives anything to slices of a row."""
    count = req.C * PER_CHUNK
    masses = batch.slices + (law_row(req, at) * 2 + 1) * count
    return tl.load(masses + which, mask=which < count, other=0.0) > 0


@triton.jit
@no_type_check
def _slices(n, CHUNKS: tl.constexpr):
    """Of piece n."""
    return tl.arange(0, CHUNKS * PER_CHUNK) + n * CHUNKS * PER_CHUNK


@triton.jit
@no_type_check
def _write_sums(batch, req, at, n, each, CHUNKS: tl.constexpr):
    """Of the chunks of piece n; `each`: the sums of their slices."""
    chunks = tl.arange(0, CHUNKS) + n * CHUNKS
    sums = tl.sum(tl.reshape(each, (CHUNKS, PER_CHUNK)), 1)
    tl.store(excess_sums(batch, req, at, chunks), sums, mask=chunks < req.C)


class Proportion(NamedTuple):
    """A law for many logits: 2^(x · slope − offset) · gain, one step and a power; 0 below the cutoff."""

    slope: Any
    offset: Any
    gain: Any
    cutoff: Any


@triton.jit
@no_type_check
def _proportion(law):
    """Twin: `law.powers`. The rounding of the offset is left to the gain."""
    offset = law.centre * law.slope
    gain = law.gain * tl.exp2(tl.fma(-law.centre, law.slope, offset))
    return Proportion(slope=law.slope, offset=offset, gain=gain, cutoff=law.cutoff)


@triton.jit
@no_type_check
def _power(x, law, CUT: tl.constexpr):
    w = near_exp2(tl.fma(x, law.slope, -law.offset))
    if CUT:
        w = tl.where(x < law.cutoff, 0.0, w)
    return w
