"""A law row's numbers, log-sum-exp or point, from what the scan left of it, where no filter cuts anything."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import BASE, CUTOFF, MASS, NUMBERS
from draftproof.kernels.request import law_row, wanted

AT_ONCE = tl.constexpr(16)  # rows


@triton.jit
@no_type_check
def plain_numbers(batch, lines, there, scale, greedy):
    """Twin: `filters.settle` without filters. Numbers of law rows `lines` [S], of `scale` [S], written down."""
    T = batch.sizes.T
    n = tl.arange(0, batch.traits.TP)[None, :]
    inside = there[:, None] & (n < T)
    m = tl.load(batch.tiles + lines[:, None] * 2 * T + n, mask=inside, other=float("-inf"))
    s = tl.load(batch.tiles + lines[:, None] * 2 * T + T + n, mask=inside, other=0.0)
    peak = tl.max(m, 1)
    sound = (peak > float("-inf")) & (peak < float("inf"))
    if greedy:
        first = tl.min(tl.where(inside & ((m == peak[:, None]) | (s < 0)), s, 2.0**30), 1)
        cutoff, base = first.to(tl.float64), tl.zeros(peak.shape, tl.float64)
        mass = tl.where(first >= 0, 1.0, float("nan")).to(tl.float64)
    else:
        distance = m - tl.where(sound, peak, 0.0)[:, None]
        cutoff, base = tl.full(peak.shape, float("-inf"), tl.float64), peak.to(tl.float64) * scale
        mass = tl.sum((s * power(distance, slope_of(scale)[:, None])).to(tl.float64), 1)
    at = batch.numbers + lines * NUMBERS
    tl.store(at + CUTOFF, cutoff, mask=there)
    tl.store(at + BASE, base, mask=there)
    tl.store(at + MASS, tl.where(sound, mass, float("nan")), mask=there)


@triton.jit
@no_type_check
def lse_at(line):
    """The log-sum-exp of a row whose numbers stand at `line`."""
    return tl.load(line + BASE) + tl.log(tl.load(line + MASS))


@triton.jit
@no_type_check
def number_all(batch, req):
    """Numbers of all law rows of a request that are looked at, by its own program; to be read when it returns."""
    J = batch.sizes.J
    count = J
    if batch.traits.READ_DRAFT:
        count = J + req.length
    for first in range(0, count, AT_ONCE):
        row = first + tl.arange(0, AT_ONCE)
        scale = tl.where(row < J, 1.0 / req.temperature, 1.0 / req.draft_temperature)
        plain_numbers(batch, law_row(batch, req, row), wanted(batch, req, row), scale, req.temperature == 0)
    tl.debug_barrier()
