"""Nodes at which a round of block verification may stop: all that is written down of them, and at which it does.

Twin: `block.station`. All nodes are looked at together: one after the other, each would wait for memory anew.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.early import at_once
from draftproof.kernels.exponent import slope_of
from draftproof.kernels.laws import Numbers
from draftproof.kernels.layout import WEIGHT
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import line_of
from draftproof.kernels.request import warm
from draftproof.kernels.residual import excess_sums, written_laws

NODES = tl.constexpr(4)  # that are looked at side by side


@triton.jit
@no_type_check
def coins_of(req, node, COUNT: tl.constexpr):
    """Of the nodes from this one on; node 0 needs none."""
    return uniform(req.seed, req.start, ACCEPT, tl.maximum(tl.arange(0, COUNT) + node - 1, 0), 0)


class Slopes(NamedTuple):
    """All laws of a request have the same two."""

    p: Any
    q: Any


@triton.jit
@no_type_check
def slopes_of(req):
    p_scale, q_scale = at_once(1.0 / warm(req.temperature)), at_once(1.0 / warm(req.draft_temperature))
    return Slopes(p=slope_of(p_scale), q=slope_of(q_scale))


class Stations(NamedTuple):
    """NODES nodes: w, the token drafted behind each, the laws there, and the residual's sums by chunk [NODES, NP]."""

    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def stations_of(batch, req, slopes, begin):
    """The nodes from `begin` on; of those at which the round cannot stop, any sums."""
    node, c = tl.arange(0, NODES) + begin, tl.arange(0, batch.traits.NP)
    there = node < req.length
    weight = tl.load(line_of(batch, req, node) + WEIGHT, mask=there, other=0.0)
    inside = there[:, None] & (c < req.C)[None, :]
    sums = tl.load(excess_sums(batch, req, node[:, None], c[None, :]), mask=inside, other=0.0)
    drafted = tl.load(batch.drafted + req.b * req.K + node, mask=there, other=-1)
    p, q = written_laws(batch, req, node, there)
    p = Numbers(slope=slopes.p, centre=p.centre, gain=p.gain, cutoff=p.cutoff)
    q = Numbers(slope=slopes.q, centre=q.centre, gain=q.gain, cutoff=q.cutoff)
    return Stations(weight=at_once(tl.exp(weight)), drafted=drafted, p=p, q=q, sums=sums)


class Stop(NamedTuple):
    """Where a round stops, and all of that node: the sums [NP] and their mass, 0 where there is no residual."""

    at: Any
    mass: Any
    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def stop_of(batch, req, slopes, accepted, coins, stations):
    """Twin: `block.station`'s chances and their coins: the deepest node whose coin says so. Of the first NODES nodes
    all is given."""
    stop = _none(batch, tl.maximum(accepted, 0).to(tl.int32))
    for begin in range(0, tl.where(accepted < 0, req.length, 0), NODES):
        node = tl.arange(0, NODES) + begin
        mass = tl.sum(stations.sums.to(tl.float64), 1)
        bit = tl.full([NODES], 1, tl.int64) << node
        sure = (-accepted & (bit - 1)) == 0
        stops = ((-accepted & bit) != 0) & (sure | (coins * (mass + (1 - stations.weight)) < mass))
        deepest = _deepest(tl.where(stops, node, -1), mass, node, stations)
        if deepest.at >= 0:
            stop = deepest
        if begin + NODES < req.length:
            coins = coins_of(req, begin + NODES, NODES)
            stations = stations_of(batch, req, slopes, begin + NODES)
    return stop


@triton.jit
@no_type_check
def _none(batch, at):
    """A place without a residual."""
    zero, one = tl.zeros((), tl.float32), tl.full((), 1.0, tl.float64)
    law = Numbers(slope=zero, centre=zero, gain=zero, cutoff=zero)
    sums = tl.zeros([batch.traits.NP], tl.float32)
    return Stop(at=at, mass=0.0 * one, weight=one, drafted=tl.full((), -1, tl.int64), p=law, q=law, sums=sums)


@triton.jit
@no_type_check
def _deepest(at, mass, node, stations):
    """The last of several nodes, -1 among them for none."""
    p, q = stations.p, stations.q
    columns = (at, mass, stations.weight, stations.drafted, p.centre, p.gain, p.cutoff, q.centre, q.gain, q.cutoff)
    at, mass, w, drafted, p_centre, p_gain, p_cutoff, q_centre, q_gain, q_cutoff = tl.reduce(columns, 0, _deeper)
    p = Numbers(slope=p.slope, centre=p_centre, gain=p_gain, cutoff=p_cutoff)
    q = Numbers(slope=q.slope, centre=q_centre, gain=q_gain, cutoff=q_cutoff)
    sums = tl.sum(tl.where((node == at)[:, None], stations.sums, 0.0), 0)
    return Stop(at=at, mass=mass, weight=w, drafted=drafted, p=p, q=q, sums=sums)


@triton.jit
@no_type_check
def _deeper(at, a, b, c, d, e, f, g, h, i, other, aa, bb, cc, dd, ee, ff, gg, hh, ii):
    first = at > other
    a, b, c = tl.where(first, a, aa), tl.where(first, b, bb), tl.where(first, c, cc)
    d, e, f = tl.where(first, d, dd), tl.where(first, e, ee), tl.where(first, f, ff)
    g, h, i = tl.where(first, g, gg), tl.where(first, h, hh), tl.where(first, i, ii)
    return tl.where(first, at, other), a, b, c, d, e, f, g, h, i
