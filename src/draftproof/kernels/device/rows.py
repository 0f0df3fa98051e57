"""Read logits on the device, applying bias, penalties and the mask of allowed tokens on the way.

Reference: core.penalties.edited and the mask of core.sampling.warp. Nothing is written back: the few edited tokens are
a short sorted list with an index by chunk (`draftproof.kernels.penalties`).
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import (
    CHUNK,
    DRAFT_ROW,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LENGTH,
    PER_TILE,
    SEED,
    SLICE,
    START,
    TARGET_ROW,
    TEMPERATURE,
)


class Request(NamedTuple):
    """One request: its index b, its `Parameters`, and the sizes that all requests share.

    A temperature of 0 is greedy. J = K + 1 target rows; C chunks and T tiles in a row.
    """

    b: Any
    seed: Any
    start: Any
    length: Any
    target_row: Any
    draft_row: Any
    temperature: Any
    draft_temperature: Any
    J: Any
    K: Any
    C: Any
    T: Any


@triton.jit
@no_type_check
def request(batch, b):
    """Load request b."""
    K = int_size(batch.sizes.K)
    C = chunks_of(batch)
    ints = batch.ints + b * INT_COLUMNS
    floats = batch.floats + b * FLOAT_COLUMNS
    return Request(
        b=b,
        seed=tl.load(ints + SEED),
        start=tl.load(ints + START),
        length=tl.load(ints + LENGTH).to(tl.int32),
        target_row=tl.load(ints + TARGET_ROW),
        draft_row=tl.load(ints + DRAFT_ROW),
        temperature=tl.load(floats + TEMPERATURE),
        draft_temperature=tl.load(floats + DRAFT_SIDE + TEMPERATURE),
        J=K + 1,
        K=K,
        C=C,
        T=tl.cdiv(C, PER_TILE),
    )


@triton.jit
@no_type_check
def int_size(size):
    """Convert a size that was passed as a float (`draftproof.kernels.compile.Sizes`)."""
    return tl.full((), size, tl.int32)


@triton.jit
@no_type_check
def chunks_of(batch):
    """Return the number of chunks in a row."""
    return tl.cdiv(batch.sizes.V, CHUNK)


@triton.jit
@no_type_check
def dist_row(req, row):
    """Return the index of a distribution row, at which its data lies."""
    return req.b * (req.J + req.K) + row


@triton.jit
@no_type_check
def needed(req, row):
    """Return whether the verdict may depend on the logits of a distribution row, or of each of several.

    A greedy target accepts what equals its argmax, whatever the drafter's distribution; a greedy drafter's distribution
    is a point mass on its token. Neither needs the draft's rows.
    """
    warm = (req.temperature > 0) & (req.draft_temperature > 0)
    return ((row < req.J) & (row <= req.length)) | ((row >= req.J) & (row < tl.where(warm, req.J + req.length, req.J)))


@triton.jit
@no_type_check
def divisor(temperature):
    """Return the temperature, or 1 for greedy rows, to divide by.

    Greedy rows never use the quotient, and a division by 0 takes twice as long.
    """
    return tl.where(temperature > 0, temperature, 1.0)


WARP = tl.constexpr(32)  # threads in a warp
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
@no_type_check
def target_row(batch, req, row):
    """Return the pointer to a target row, or to each of several."""
    return _target_row(batch, req.target_row, row)


@triton.jit
@no_type_check
def _target_row(batch, first, row):
    """Return the pointer to a target row of the request whose rows begin at `first`."""
    return batch.target + first * batch.strides.target + row.to(tl.int64) * batch.strides.target_row


@triton.jit
@no_type_check
def draft_row(batch, req, row):
    """Return the pointer to a draft row, or to each of several."""
    return batch.draft + req.draft_row * batch.strides.draft + row.to(tl.int64) * batch.strides.draft_row


@triton.jit
@no_type_check
def dist_slices(batch, req, row, begin, there, other=NOTHING):
    """Load raw logits of a distribution row, in the slices that begin at `begin` (`whole_slices`), if `there`.

    Logits that do not exist are `other`; with None they are undefined, which saves initialising registers.
    """
    end = tl.where(there, tl.where(row < req.J, batch.sizes.V, batch.sizes.R), 0)
    if batch.traits.ALIKE:  # one load serves both
        at = tl.where(row < req.J, target_row(batch, req, row), draft_row(batch, req, row - req.J))
        x = whole_slices(at, begin, end, batch.traits.SEGMENT, other)
    elif row < req.J:
        x = whole_slices(target_row(batch, req, row), begin, end, batch.traits.SEGMENT, other).to(tl.float32)
    else:
        x = whole_slices(draft_row(batch, req, row - req.J), begin, end, batch.traits.SEGMENT, other).to(tl.float32)
    return x


@triton.jit
@no_type_check
def batch_slices(batch, b, row, begin, there):
    """Load raw logits of request b's target row before the request is known.

    Assumes rows stored in request order (not ragged).
    """
    at = _target_row(batch, b, row)
    x = whole_slices(at, begin, tl.where(there, batch.sizes.V, 0), batch.traits.SEGMENT, None)
    if not batch.traits.ALIKE:
        x = x.to(tl.float32)
    return x


@triton.jit
@no_type_check
def dist_parts(batch, req, row, begin):
    """Load slices as float32 with edits and mask applied, part by part [WIDTH, S].

    Each warp then holds whole slices, and a thread the same offset in each part. Where edits or a mask may apply, a
    part is a slice.
    """
    end = tl.where(row < req.J, batch.sizes.V, batch.sizes.R)
    WIDTH: tl.constexpr = SLICE if batch.traits.EDITED or batch.traits.MASKED else WARP
    if batch.traits.ALIKE:
        at = tl.where(row < req.J, target_row(batch, req, row), draft_row(batch, req, row - req.J))
        x = _parts(at, begin, end, WIDTH)
    elif row < req.J:
        x = _parts(target_row(batch, req, row), begin, end, WIDTH)
    else:
        x = _parts(draft_row(batch, req, row - req.J), begin, end, WIDTH)
    if WIDTH == SLICE:
        x = (_edit_and_mask(batch, req, row + tl.zeros(begin.shape, tl.int32), _token_ids(begin, SLICE), x[0], 0),)
    return x


@triton.jit
@no_type_check
def _parts(at, begin, end, WIDTH: tl.constexpr):
    """Load slices as a tuple of parts of WIDTH tokens."""
    o = _token_ids(begin, WIDTH)
    x = ()
    for i in tl.static_range(SLICE // WIDTH):
        x += (_segments(at, o + i * WIDTH, end).to(tl.float32),)
    return x


@triton.jit
@no_type_check
def _token_ids(begin, WIDTH: tl.constexpr):
    """Return the tokens from `begin` [S] on, [WIDTH, S], with neighbours swapped.

    The swap keeps the compiler from vectorising the load: all parts get the same layout, one number per thread.
    """
    return begin[None, :] + (tl.arange(0, WIDTH) ^ 1)[:, None]


@triton.jit
@no_type_check
def with_edits(batch, req, row, begin, x):
    """Return loaded slices as float32 with edits and mask applied.

    Where edits or a mask may apply, a segment is a slice.
    """
    x = x.to(tl.float32)
    if batch.traits.EDITED or batch.traits.MASKED:
        SLICES: tl.constexpr = begin.shape[0]
        o = begin[:, None] + tl.arange(0, SLICE)[None, :]
        x = _edit_and_mask(batch, req, row + tl.zeros([SLICES], tl.int32), o, tl.reshape(x, (SLICES, SLICE)), 1)
        x = tl.reshape(x, (SLICES, SLICE, 1))
    return x


@triton.jit
@no_type_check
def whole_slices(at, begin, end, SEGMENT: tl.constexpr, other=NOTHING):
    """Load raw logits of the row at `at` in the slices that begin at `begin` [S]: [S, SEGMENT, parts of a slice].

    Tokens from `end` on are `other`. The parts are loaded one by one and joined: then few threads share a slice, each
    holds its share of all parts, and sums over a slice need few exchanges between threads.
    """
    o = begin[:, None] + tl.arange(0, SEGMENT)[None, :]
    PARTS: tl.constexpr = SLICE // SEGMENT
    x = _segments(at, o, end, other)
    if PARTS == 2:
        x = tl.join(x, _segments(at, o + SEGMENT, end, other))
    if PARTS == 4:
        more = tl.join(_segments(at, o + 2 * SEGMENT, end, other), _segments(at, o + 3 * SEGMENT, end, other))
        x = tl.permute(tl.join(tl.join(x, _segments(at, o + SEGMENT, end, other)), more), (0, 1, 3, 2))
    return tl.reshape(x, (begin.shape[0], SEGMENT, PARTS))


@triton.jit
@no_type_check
def segment_tokens(begin, SEGMENT: tl.constexpr):
    """Return the token ids of `whole_slices`, in the same shape."""
    part = tl.arange(0, SLICE // SEGMENT)[None, None, :] * SEGMENT
    return begin[:, None, None] + tl.arange(0, SEGMENT)[None, :, None] + part


@triton.jit
@no_type_check
def _segments(at, o, end, other=NOTHING):
    """Load tokens `o` of the row at `at`; `other` from `end` on."""
    return tl.load(at + o, mask=o < end, other=other)


@triton.jit
@no_type_check
def take_target(batch, req, rows, o):
    """Load logits of tokens `o` [S, W] in target rows `rows` [S] as float32, with edits and mask; −inf if outside.

    The tokens of one line of `o` lie in one chunk; a negative token loads nothing.
    """
    there = (o >= 0) & (o < batch.sizes.V)
    x = tl.load(target_row(batch, req, rows)[:, None] + o, mask=there, other=NOTHING)
    return _edit_and_mask(batch, req, rows, o, x.to(tl.float32), 1)


@triton.jit
@no_type_check
def take_draft(batch, req, rows, o):
    """Load logits of draft rows; `o` are entries of the draft vocabulary (see `take_target`)."""
    return take_draft_before(batch, req, rows, o, batch.sizes.R)


@triton.jit
@no_type_check
def take_draft_before(batch, req, rows, o, end):
    """Load logits of draft rows for entries before `end`; an end of 0 reads nothing (see `take_target`)."""
    there = (o >= 0) & (o < end)
    x = tl.load(draft_row(batch, req, rows)[:, None] + o, mask=there, other=NOTHING)
    return _edit_and_mask(batch, req, req.J + rows, o, x.to(tl.float32), 1)


@triton.jit
@no_type_check
def _edit_and_mask(batch, req, rows, o, x, AXIS: tl.constexpr):
    """Apply edits and mask to logits x of distribution rows `rows` [S]; AXIS runs along the tokens.

    The mask applies to target rows only.
    """
    draft = rows >= req.J
    if batch.traits.EDITED:
        x = _edit(x, o, batch.edits, req.b * 2 + draft.to(tl.int64), dist_row(req, rows.to(tl.int64)), req.C, AXIS)
    if batch.traits.MASKED:
        bits = batch.allowed + req.target_row * batch.strides.allowed + rows.to(tl.int64) * batch.strides.allowed_row
        draft = tl.expand_dims(draft, AXIS)
        there = (o >= 0) & (o < batch.sizes.V) & ~draft
        word = tl.load(tl.expand_dims(bits, AXIS) + (o >> 5), mask=there, other=0)
        x = tl.where((((word >> (o & 31)) & 1) != 0) | draft, x, NOTHING)
    return x


@triton.jit
@no_type_check
def _edit(x, o, edits, side, lines, C, AXIS: tl.constexpr):
    """Apply bias, then the repetition penalty by sign, then subtract presence and frequency penalties.

    Reference: core.penalties._edit.
    """
    E = int_size(edits.E)
    chunk = tl.minimum(tl.maximum(tl.min(o, AXIS), 0) // CHUNK, C - 1)
    first = edits.first + side * (C + 1) + chunk
    here = tl.load(first)
    count = tl.load(first + 1) - here
    for n in range(0, tl.max(count, 0)):
        real = n < count
        token = tl.load(edits.tokens + side * E + here + n, mask=real, other=-1)
        at = edits.amounts + (lines * E + here + n) * 4
        bias = tl.expand_dims(tl.load(at, mask=real, other=0.0), AXIS)
        up = tl.expand_dims(tl.load(at + 1, mask=real, other=1.0), AXIS)
        down = tl.expand_dims(tl.load(at + 2, mask=real, other=1.0), AXIS)
        spent = tl.expand_dims(tl.load(at + 3, mask=real, other=0.0), AXIS)
        y = x + bias
        x = tl.where((o == tl.expand_dims(token, AXIS)) & (o >= 0), y * tl.where(y > 0, up, down) - spent, x)
    return x


@triton.jit
@no_type_check
def entry_of(batch, tokens):
    """Return the draft vocabulary's entry of each token; negative if it has none.

    Reference: core.distribution.DraftVocab.entry.
    """
    entry = tokens.to(tl.int32)
    if batch.traits.MAPPED:
        there = (tokens >= 0) & (tokens < batch.sizes.V)
        entry = tl.load(batch.entries + tokens, mask=there, other=-1).to(tl.int32)
    return entry
