"""Law rows' numbers: log-sum-exp or point, made of what the scan left of a row, or as `settle` wrote them down."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import BASE, CUTOFF, MASS, NUMBERS
from draftproof.kernels.request import law_row, wanted


class Settled(NamedTuple):
    """Numbers of several law rows, float64 (`draftproof.kernels.layout`): cutoff, base and mass of each."""

    cutoff: Any
    base: Any
    mass: Any


@triton.jit
@no_type_check
def line_of(batch, req, row):
    """Where the numbers of a law row stand."""
    return batch.numbers + law_row(req, row) * NUMBERS


@triton.jit
@no_type_check
def target_settled(batch, req):
    """Numbers of a request's target rows [KP]."""
    i = tl.arange(0, batch.traits.KP)
    return _settled(batch, req, i, i <= req.length, req.temperature, not batch.traits.FILTERED, True)


@triton.jit
@no_type_check
def draft_settled(batch, req):
    """Numbers of a request's draft rows [KP], of which a greedy request has none."""
    i = tl.arange(0, batch.traits.KP)
    there = (i < req.length) & wanted(req, req.J + i)
    NEW: tl.constexpr = batch.traits.READ_DRAFT and not batch.traits.FILTERED
    return _settled(batch, req, req.J + i, there, req.draft_temperature, NEW, False)


@triton.jit
@no_type_check
def _settled(batch, req, rows, there, temperature, NEW: tl.constexpr, MAY_POINT: tl.constexpr):
    """Numbers of some rows; where they are new, written down as well."""
    if NEW:
        settled = plain_numbers(batch, req, rows, there, temperature, MAY_POINT)
        write_settled(line_of(batch, req, rows), there, settled)
    else:
        settled = _read(line_of(batch, req, rows), there)
    return settled


@triton.jit
@no_type_check
def _read(line, there):
    return Settled(
        cutoff=tl.load(line + CUTOFF, mask=there, other=0.0),
        base=tl.load(line + BASE, mask=there, other=0.0),
        mass=tl.load(line + MASS, mask=there, other=1.0),
    )


@triton.jit
@no_type_check
def write_settled(line, there, settled):
    tl.store(line + CUTOFF, settled.cutoff, mask=there)
    tl.store(line + BASE, settled.base, mask=there)
    tl.store(line + MASS, settled.mass, mask=there)


@triton.jit
@no_type_check
def plain_numbers(batch, req, rows, there, temperature, MAY_POINT: tl.constexpr):
    """Twin: `filters.settle` without filters. Of law rows `rows` [S] that are `there`; of others, a mass of 1.

    MAY_POINT: whether they may be greedy.
    """
    T = req.T
    n = tl.arange(0, batch.traits.TP)[None, :]
    inside = there[:, None] & (n < T)
    tiles = batch.tiles + law_row(req, rows)[:, None] * 2 * T + n
    m = tl.load(tiles, mask=inside, other=float("-inf"))
    s = tl.load(tiles + T, mask=inside, other=0.0)
    peak = tl.max(m, 1)
    sound = (peak > float("-inf")) & (peak < float("inf"))
    scale = 1.0 / temperature
    distance = m - tl.where(sound, peak, 0.0)[:, None]
    cutoff, base = tl.full(peak.shape, float("-inf"), tl.float64), peak.to(tl.float64) * scale
    mass = tl.sum((s * power(distance, slope_of(scale))).to(tl.float64), 1)
    if MAY_POINT:
        first = tl.min(tl.where(inside & ((m == peak[:, None]) | (s < 0)), s, 2.0**30), 1).to(tl.float64)
        greedy = temperature == 0
        cutoff, base = tl.where(greedy, first, cutoff), tl.where(greedy, 0.0, base)
        mass = tl.where(greedy, tl.where(first >= 0, 1.0, float("nan")), mass)
    mass = tl.where(there, tl.where(sound, mass, float("nan")), 1.0)
    return Settled(cutoff=cutoff, base=tl.where(there, base, 0.0), mass=mass)


@triton.jit
@no_type_check
def pick(x, at):
    """The entry of x [S] at an index, as a number."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == at, x, 0.0), 0)


@triton.jit
@no_type_check
def picked(settled, at):
    """One row's numbers out of several rows'."""
    return Settled(cutoff=pick(settled.cutoff, at), base=pick(settled.base, at), mass=pick(settled.mass, at))
