"""Provide the statistics of distribution rows: log-sum-exp, cutoff or argmax.

They are computed from the tiles that the scan has left, or read back where `settle` has stored them.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BASE, CUTOFF, MASS, PER_CHUNK, ROW_STATS
from draftproof.kernels.device.math import key, power, slope_of, value
from draftproof.kernels.device.rows import dist_row, divisor, needed
from draftproof.kernels.device.shortlist import bound_count, bound_mass


class RowStats(NamedTuple):
    """Cutoff, base and mass of several distribution rows, float64 (`draftproof.kernels.device.layout`)."""

    cutoff: Any
    base: Any
    mass: Any


@triton.jit
@no_type_check
def row_stats_at(batch, req, row):
    """Return the pointer to the statistics of a distribution row."""
    return batch.row_stats + dist_row(req, row) * ROW_STATS


class TileStats(NamedTuple):
    """Tiles of several distribution rows [S, TP] as the scan left them: largest logit m, mass s, and which exist."""

    m: Any
    s: Any
    inside: Any


@triton.jit
@no_type_check
def load_target_stats(batch, req):
    """Load what exists of the statistics of a request's target rows: stored values, or tiles.

    Issue these loads before computing on any of them; otherwise each load waits for the one before it.
    """
    i = tl.arange(0, batch.traits.KP)
    return _load(batch, req, i, i <= req.length, not batch.traits.FILTERED)


@triton.jit
@no_type_check
def load_draft_stats(batch, req):
    """Load what exists of the statistics of a request's draft rows; a greedy request has none."""
    i = tl.arange(0, batch.traits.KP)
    there = (i < req.length) & needed(req, req.J + i)
    return _load(batch, req, req.J + i, there, batch.traits.READ_DRAFT and not batch.traits.FILTERED)


@triton.jit
@no_type_check
def saved_target_stats(batch, req, loaded):
    """Return the statistics of a request's target rows [KP], and store them if they are new."""
    i = tl.arange(0, batch.traits.KP)
    stats = target_stats(batch, req, loaded, 1.0 / divisor(req.temperature))
    if not batch.traits.FILTERED:
        save_stats(row_stats_at(batch, req, i), i <= req.length, stats)
    return stats


@triton.jit
@no_type_check
def target_stats(batch, req, loaded, scale):
    """Return the statistics of a request's target rows [KP] without storing them.

    For kernels in which no other program needs them.
    """
    i = tl.arange(0, batch.traits.KP)
    return _stats(loaded, i <= req.length, req.temperature, scale, not batch.traits.FILTERED, True)


@triton.jit
@no_type_check
def target_argmax(batch, req, loaded):
    """Return the argmax token of each target row of a greedy request [KP]; -1 if a row is not a distribution."""
    if batch.traits.FILTERED:  # noqa: SIM108  (only one of them is compiled)
        points = greedy_tokens(loaded)
    else:
        points = _argmax(loaded, tl.max(loaded.m, 1)).to(tl.int32)
    return points


@triton.jit
@no_type_check
def greedy_tokens(stats):
    """Return the argmax tokens held by the statistics of greedy rows; -1 if a row is not a distribution."""
    return tl.where(stats.mass == stats.mass, stats.cutoff, -1.0).to(tl.int32)


@triton.jit
@no_type_check
def draft_stats(batch, req, loaded, scale):
    """Return the statistics of a request's draft rows [KP] without storing them."""
    i = tl.arange(0, batch.traits.KP)
    there = (i < req.length) & needed(req, req.J + i)
    NEW: tl.constexpr = batch.traits.READ_DRAFT and not batch.traits.FILTERED
    return _stats(loaded, there, req.draft_temperature, scale, NEW, False)


@triton.jit
@no_type_check
def _load(batch, req, rows, there, NEW: tl.constexpr):
    """Load the tiles of rows, or their stored statistics."""
    if NEW:  # noqa: SIM108  (only one of them is compiled)
        loaded = load_tile_stats(batch, req, rows, there)
    else:
        loaded = _read_stats(row_stats_at(batch, req, rows), there)
    return loaded


@triton.jit
@no_type_check
def _stats(loaded, there, temperature, scale, NEW: tl.constexpr, MAY_POINT: tl.constexpr):
    """Return the statistics of rows from what `_load` returned."""
    if NEW:  # noqa: SIM108  (only one of them is compiled)
        stats = unfiltered_stats(loaded, there, temperature, scale, MAY_POINT)
    else:
        stats = loaded
    return stats


@triton.jit
@no_type_check
def _read_stats(line, there):
    """Load stored statistics of rows."""
    return RowStats(
        cutoff=tl.load(line + CUTOFF, mask=there, other=0.0),
        base=tl.load(line + BASE, mask=there, other=0.0),
        mass=tl.load(line + MASS, mask=there, other=1.0),
    )


@triton.jit
@no_type_check
def save_stats(line, there, stats):
    """Store the statistics of rows."""
    tl.store(line + CUTOFF, stats.cutoff, mask=there)
    tl.store(line + BASE, stats.base, mask=there)
    tl.store(line + MASS, stats.mass, mask=there)


@triton.jit
@no_type_check
def load_tile_stats(batch, req, rows, there):
    """Load the tiles of distribution rows."""
    T = req.T
    n = tl.arange(0, batch.traits.TP)[None, :]
    inside = there[:, None] & (n < T)
    tiles = batch.tile_stats + dist_row(req, rows)[:, None] * 2 * T + n
    m = tl.load(tiles, mask=inside, other=float("-inf"))
    return TileStats(m=m, s=tl.load(tiles + T, mask=inside, other=0.0), inside=inside)


@triton.jit
@no_type_check
def unfiltered_stats(tiles, there, temperature, scale, MAY_POINT: tl.constexpr):
    """Return the statistics of rows without filters from their tiles. Reference: core.filters.filter_stats.

    Rows not in `there` get a mass of 1. scale: 1 / temperature. MAY_POINT: whether the rows may be greedy.
    """
    peak = tl.max(tiles.m, 1)
    valid = _is_finite(peak)
    cutoff = tl.full(peak.shape, float("-inf"), tl.float64)
    if MAY_POINT and temperature == 0:
        cutoff = _argmax(tiles, peak).to(tl.float64)
        base, mass = tl.zeros_like(cutoff), tl.where(cutoff >= 0, 1.0, float("nan")).to(tl.float64)
    else:
        base, mass = peak.to(tl.float64) * scale, _mass(tiles, peak, valid, scale)
    mass = tl.where(there, tl.where(valid, mass, float("nan")), 1.0)
    return RowStats(cutoff=cutoff, base=tl.where(there, base, 0.0), mass=mass)


@triton.jit
@no_type_check
def _mass(tiles, peak, valid, scale):
    """Return the mass of rows relative to the peak, float64."""
    distance = tiles.m - tl.where(valid, peak, 0.0)[:, None]
    return tl.sum((tiles.s * power(distance, slope_of(scale))).to(tl.float64), 1)


@triton.jit
@no_type_check
def _argmax(tiles, peak):
    """Return the first token that has the peak; -1 if no logit is finite or one is NaN."""
    candidates = tiles.inside & ((tiles.m == peak[:, None]) | (tiles.s < 0))
    return tl.where(_is_finite(peak), tl.min(tl.where(candidates, tiles.s, 2.0**30), 1), -1.0)


@triton.jit
@no_type_check
def _is_finite(peak):
    """Return whether the largest logit of a row is finite."""
    return (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
@no_type_check
def pick(x, at):
    """Return x[at] of a tensor x [S], as a scalar."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == at, x, 0.0), 0)


class SliceStats(NamedTuple):
    """Slices of a row as the scan left them [NS]: largest logit m, mass s; and the extremes of m."""

    m: Any
    s: Any
    peak: Any
    least: Any


class SliceMasses(NamedTuple):
    """Masses of the slices [NS] relative to the row's largest logit, and their sum, float64."""

    mass: Any
    total: Any


@triton.jit
@no_type_check
def load_slice_stats(batch, req, row):
    """Load the slices of a row; a row with a NaN gets a peak of +inf.

    The largest and the smallest m are found in one reduction, as integers.
    """
    count = req.C * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    slices = batch.slice_stats + dist_row(req, row) * 2 * count + n
    m = tl.load(slices, mask=n < count, other=float("-inf"))
    s = tl.load(slices + count, mask=n < count, other=0.0)
    largest = key(tl.where(s == s, m, float("inf")))
    # ~, not −: ptxas 12.8 drops one sign in the maximum of three negated numbers (sm_90)
    least = ~key(tl.where(m > float("-inf"), m, float("inf")))
    largest, least = tl.split(tl.max(tl.join(largest, least), 0))
    return SliceStats(m=m, s=s, peak=value(largest), least=value(~least))


@triton.jit
@no_type_check
def slice_masses(summary, scale):
    """Return the masses of a row's slices relative to its peak."""
    mass = summary.s * power(summary.m - summary.peak, slope_of(scale))
    return SliceMasses(mass=mass, total=tl.sum(mass.to(tl.float64), 0))


@triton.jit
@no_type_check
def min_p_floor(filters, peak, scale):
    """Return the logit below which min-p removes tokens; −inf without min-p."""
    floor = tl.zeros((), tl.float32) + float("-inf")
    if filters.min_p > 0:
        floor = (peak.to(tl.float64) + tl.log(filters.min_p) / scale).to(tl.float32)
    return floor


@triton.jit
@no_type_check
def cutoff_bound(filters, summary, masses, floor, scale):
    """Return a lower bound of the cutoff. The masses are used only if top-k is off."""
    low = floor
    if filters.k > 0:
        # top-p is of the mass of all k, including those that min-p removes
        low = bound_count(summary.m, summary.peak, summary.least, filters.k)
    elif filters.top_p < 1:
        goal = filters.top_p * masses.total
        low = bound_mass(summary.m, summary.peak, summary.least, masses.mass, masses.total, scale, goal)
        low = tl.maximum(floor, low)
    return low
