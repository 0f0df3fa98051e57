"""How much of a row reaches a number: counts or masses of its logits, by a sample or by a pass over its slices."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.cutoff import LINES, answer, ask, ask_parts
from draftproof.kernels.exponent import INTERPRETED, near_exp2, slope_of
from draftproof.kernels.layout import SLICE
from draftproof.kernels.sums import add_to, in_grains, no_sums

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
    """How much reaches each of `borders` [P], in grains of `most` (`draftproof.kernels.sums`), which no sum exceeds.
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
