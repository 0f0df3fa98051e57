"""Distribution rows' numbers: log-sum-exp or point, made of what the scan left of a row, or as `settle` wrote them down."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.layout import BASE, CUTOFF, MASS, NUMBERS, PER_CHUNK
from draftproof.kernels.device.math import key, power, slope_of, value
from draftproof.kernels.device.rows import dist_row, wanted, warm
from draftproof.kernels.device.shortlist import bound_count, bound_mass


class Settled(NamedTuple):
    """Numbers of several distribution rows, float64 (`draftproof.kernels.device.layout`): cutoff, base and mass of each."""

    cutoff: Any
    base: Any
    mass: Any


@triton.jit
@no_type_check
def line_of(batch, req, row):
    """Where the numbers of a distribution row stand."""
    return batch.numbers + dist_row(req, row) * NUMBERS


class Tiles(NamedTuple):
    """Of the tiles of several distribution rows [S, TP], as the scan left them: largest logit and mass, and which are there."""

    m: Any
    s: Any
    inside: Any


@triton.jit
@no_type_check
def target_known(batch, req):
    """What there is of a request's target rows: to be asked for before any of it is worked on, or each waits anew."""
    i = tl.arange(0, batch.traits.KP)
    return _known(batch, req, i, i <= req.length, not batch.traits.FILTERED)


@triton.jit
@no_type_check
def draft_known(batch, req):
    """The same of its draft rows, of which a greedy request has none."""
    i = tl.arange(0, batch.traits.KP)
    there = (i < req.length) & wanted(req, req.J + i)
    return _known(batch, req, req.J + i, there, batch.traits.READ_DRAFT and not batch.traits.FILTERED)


@triton.jit
@no_type_check
def target_settled(batch, req, known):
    """Numbers of a request's target rows [KP]; where they are new, written down as well."""
    i = tl.arange(0, batch.traits.KP)
    settled = target_numbers(batch, req, known, 1.0 / warm(req.temperature))
    if not batch.traits.FILTERED:
        write_settled(line_of(batch, req, i), i <= req.length, settled)
    return settled


@triton.jit
@no_type_check
def target_numbers(batch, req, known, scale):
    """Numbers of a request's target rows [KP], for a program that alone needs them: nothing is written."""
    i = tl.arange(0, batch.traits.KP)
    return _numbers(known, i <= req.length, req.temperature, scale, not batch.traits.FILTERED, True)


@triton.jit
@no_type_check
def target_points(batch, req, known):
    """Of a greedy request, the token that each of its target rows stands for [KP]; -1 where a row is no distribution."""
    if batch.traits.FILTERED:  # noqa: SIM108  (only one of them is compiled)
        points = points_of(known)
    else:
        points = _points(known, tl.max(known.m, 1)).to(tl.int32)
    return points


@triton.jit
@no_type_check
def points_of(settled):
    """The same, of greedy rows' numbers."""
    return tl.where(settled.mass == settled.mass, settled.cutoff, -1.0).to(tl.int32)


@triton.jit
@no_type_check
def draft_numbers(batch, req, known, scale):
    """The same of its draft rows."""
    i = tl.arange(0, batch.traits.KP)
    there = (i < req.length) & wanted(req, req.J + i)
    NEW: tl.constexpr = batch.traits.READ_DRAFT and not batch.traits.FILTERED
    return _numbers(known, there, req.draft_temperature, scale, NEW, False)


@triton.jit
@no_type_check
def _known(batch, req, rows, there, NEW: tl.constexpr):
    """Numbers that are written down, or what they are made of."""
    if NEW:  # noqa: SIM108  (only one of them is compiled)
        known = tiles_of(batch, req, rows, there)
    else:
        known = _read(line_of(batch, req, rows), there)
    return known


@triton.jit
@no_type_check
def _numbers(known, there, temperature, scale, NEW: tl.constexpr, MAY_POINT: tl.constexpr):
    if NEW:  # noqa: SIM108  (only one of them is compiled)
        settled = plain_numbers(known, there, temperature, scale, MAY_POINT)
    else:
        settled = known
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
def tiles_of(batch, req, rows, there):
    T = req.T
    n = tl.arange(0, batch.traits.TP)[None, :]
    inside = there[:, None] & (n < T)
    tiles = batch.tiles + dist_row(req, rows)[:, None] * 2 * T + n
    m = tl.load(tiles, mask=inside, other=float("-inf"))
    return Tiles(m=m, s=tl.load(tiles + T, mask=inside, other=0.0), inside=inside)


@triton.jit
@no_type_check
def plain_numbers(tiles, there, temperature, scale, MAY_POINT: tl.constexpr):
    """Twin: `filters.settle` without filters. Of the distribution rows of these tiles that are `there`; of others, a mass of 1.

    scale: 1 / temperature. MAY_POINT: whether they may be greedy.
    """
    peak = tl.max(tiles.m, 1)
    sound = _sound(peak)
    cutoff = tl.full(peak.shape, float("-inf"), tl.float64)
    if MAY_POINT and temperature == 0:
        cutoff = _points(tiles, peak).to(tl.float64)
        base, mass = tl.zeros_like(cutoff), tl.where(cutoff >= 0, 1.0, float("nan")).to(tl.float64)
    else:
        base, mass = peak.to(tl.float64) * scale, _mass(tiles, peak, sound, scale)
    mass = tl.where(there, tl.where(sound, mass, float("nan")), 1.0)
    return Settled(cutoff=cutoff, base=tl.where(there, base, 0.0), mass=mass)


@triton.jit
@no_type_check
def _mass(tiles, peak, sound, scale):
    """Relative to the peak, float64."""
    distance = tiles.m - tl.where(sound, peak, 0.0)[:, None]
    return tl.sum((tiles.s * power(distance, slope_of(scale))).to(tl.float64), 1)


@triton.jit
@no_type_check
def _points(tiles, peak):
    """The first token that has the peak; -1 where there is none that is finite, or NaN is among the logits."""
    candidates = tiles.inside & ((tiles.m == peak[:, None]) | (tiles.s < 0))
    return tl.where(_sound(peak), tl.min(tl.where(candidates, tiles.s, 2.0**30), 1), -1.0)


@triton.jit
@no_type_check
def _sound(peak):
    return (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
@no_type_check
def pick(x, at):
    """The entry of x [S] at an index, as a number."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == at, x, 0.0), 0)


class Summary(NamedTuple):
    """What the scan tells of a row: largest logit and sum by slice [NS], the largest and the least of these logits."""

    m: Any
    s: Any
    peak: Any
    least: Any


class Masses(NamedTuple):
    """Masses of the slices [NS], relative to the row's largest logit, and their sum, float64."""

    mass: Any
    total: Any


@triton.jit
@no_type_check
def summary_of(batch, req, row):
    """Largest and least are found in one step, as whole numbers. A row with NaN in it has a peak of +inf."""
    count = req.C * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    slices = batch.slices + dist_row(req, row) * 2 * count + n
    m = tl.load(slices, mask=n < count, other=float("-inf"))
    s = tl.load(slices + count, mask=n < count, other=0.0)
    largest = key(tl.where(s == s, m, float("inf")))
    # ~, not −: of the largest of three numbers with signs turned, ptxas 12.8 forgets one sign (sm_90)
    least = ~key(tl.where(m > float("-inf"), m, float("inf")))
    largest, least = tl.split(tl.max(tl.join(largest, least), 0))
    return Summary(m=m, s=s, peak=value(largest), least=value(~least))


@triton.jit
@no_type_check
def masses_of(summary, scale):
    mass = summary.s * power(summary.m - summary.peak, slope_of(scale))
    return Masses(mass=mass, total=tl.sum(mass.to(tl.float64), 0))


@triton.jit
@no_type_check
def floor_of(filters, peak, scale):
    """What min-p cuts off lies under this."""
    floor = tl.zeros((), tl.float32) + float("-inf")
    if filters.min_p > 0:
        floor = (peak.to(tl.float64) + tl.log(filters.min_p) / scale).to(tl.float32)
    return floor


@triton.jit
@no_type_check
def bound_of(filters, summary, masses, floor, scale):
    """A number that the cutoff does not lie under. The masses are looked at only where k is off."""
    low = floor
    if filters.k > 0:
        # top-p counts all k, those too that min-p takes off
        low = bound_count(summary.m, summary.peak, summary.least, filters.k)
    elif filters.top_p < 1:
        goal = filters.top_p * masses.total
        low = bound_mass(summary.m, summary.peak, summary.least, masses.mass, masses.total, scale, goal)
        low = tl.maximum(floor, low)
    return low
