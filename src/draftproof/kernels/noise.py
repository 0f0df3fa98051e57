"""The round's randomness on the device. Twin: `draftproof.core.noise`, word for word and bit for bit."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.core.noise import Site

DRAFT = tl.constexpr(int(Site.DRAFT))
ACCEPT = tl.constexpr(int(Site.ACCEPT))
CLOSE = tl.constexpr(int(Site.CLOSE))
THIN = tl.constexpr(int(Site.THIN))
POSITION = tl.constexpr(int(Site.POSITION))

HALF_STEP = tl.constexpr(2.0**-54)


@triton.jit
@no_type_check
def unit(high, low):
    """Twin: `noise.unit`. 53 of 64 bits as a float64 in [0, 1)."""
    bits = (high >> 5).to(tl.uint64) * 67108864 + (low >> 6).to(tl.uint64)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
@no_type_check
def uniform(seed, start, site: tl.constexpr, lanes, j: tl.constexpr):
    """Twin: `Noise.uniform`."""
    a, b, _, _ = tl.philox(seed, lanes.to(tl.uint32), j, start.to(tl.uint32), site)
    return unit(a, b)


@triton.jit
@no_type_check
def pair(seed, start, site: tl.constexpr, lanes, j: tl.constexpr):
    """Twin: `Noise.pair`."""
    a, b, c, d = tl.philox(seed, lanes.to(tl.uint32), j, start.to(tl.uint32), site)
    return unit(a, b), unit(c, d)


@triton.jit
@no_type_check
def pair_at(seed, start, site: tl.constexpr, lanes, j):
    """Twin: `Noise.pair`, for a j that is known when the kernel runs."""
    a, b, c, d = tl.philox(seed, lanes.to(tl.uint32), j.to(tl.uint32), start.to(tl.uint32), site)
    return unit(a, b), unit(c, d)


@triton.jit
@no_type_check
def exponential(seed, start, site: tl.constexpr, lanes, j: tl.constexpr):
    """Twin: `Noise.exponential`.

    −log1p(−v) for v in (0, 1), from log alone: the factor v / (1 − y) makes up for the rounding of y = 1 − v.
    """
    v = uniform(seed, start, site, lanes, j) + HALF_STEP
    y = 1.0 - v
    near = y == 1.0
    return tl.where(near, v, -tl.log(y) * v / tl.where(near, 1.0, 1.0 - y))
