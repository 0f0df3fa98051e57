"""Generate the round's random numbers on the device with Philox4x32-10 (Salmon et al. 2011), counter based.

Reference: `draftproof.core.rng`, equal bit for bit.
"""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.core.rng import Purpose

DRAFT = tl.constexpr(int(Purpose.DRAFT))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
CLOSE = tl.constexpr(int(Purpose.CLOSE))
THIN = tl.constexpr(int(Purpose.THIN))
POSITION = tl.constexpr(int(Purpose.POSITION))

ROUND_A, ROUND_B = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
KEY_A, KEY_B = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
HALF_STEP = tl.constexpr(2.0**-54)


@triton.jit
@no_type_check
def words(seed, start, purpose: tl.constexpr, lanes, j):
    """Return four 32-bit words for each lane. Reference: core.rng.philox.

    The ten rounds are a loop: unrolled code takes ten times as long to compile.
    """
    c0 = lanes.to(tl.uint32)
    c1, c2, c3 = tl.zeros_like(c0) + j, tl.zeros_like(c0) + start.to(tl.uint32), tl.zeros_like(c0) + purpose
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in range(10):
        high, low = tl.umulhi(c2, ROUND_B), _times(c2, ROUND_B)
        c2, c3 = tl.umulhi(c0, ROUND_A) ^ c3 ^ k1, _times(c0, ROUND_A)
        c0, c1 = high ^ c1 ^ k0, low
        k0, k1 = _plus(k0, KEY_A), _plus(k1, KEY_B)
    return c0, c1, c2, c3


@triton.jit
@no_type_check
def _times(a, b):
    """Multiply modulo 2³²."""
    return tl.mul(a, b, sanitize_overflow=False)


@triton.jit
@no_type_check
def _plus(a, b):
    """Add modulo 2³²."""
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
@no_type_check
def unit(high, low):
    """Return 53 of 64 bits as a float64 in [0, 1). Reference: core.rng.Philox.pairs."""
    bits = (high >> 5).to(tl.uint64) * 67108864 + (low >> 6).to(tl.uint64)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
@no_type_check
def uniform(seed, start, purpose: tl.constexpr, lanes, j: tl.constexpr):
    """Return one uniform number for each lane. Reference: core.rng.Philox.uniform."""
    a, b, _, _ = words(seed, start, purpose, lanes, tl.full((), j, tl.uint32))
    return unit(a, b)


@triton.jit
@no_type_check
def pair(seed, start, purpose: tl.constexpr, lanes, j):
    """Return two uniform numbers for each lane. Reference: core.rng.Philox.pair."""
    a, b, c, d = words(seed, start, purpose, lanes, tl.full((), j, tl.uint32))
    return unit(a, b), unit(c, d)


@triton.jit
@no_type_check
def exponential(seed, start, purpose: tl.constexpr, lanes, j: tl.constexpr):
    """Return one Exp(1) number for each lane. Reference: core.rng.Philox.exponential.

    −log1p(−v) for v in (0, 1), from log alone: the factor v / (1 − y) corrects for the rounding of y = 1 − v.
    """
    v = uniform(seed, start, purpose, lanes, j) + HALF_STEP
    y = 1.0 - v
    near = y == 1.0
    return tl.where(near, v, -tl.log(y) * v / tl.where(near, 1.0, 1.0 - y))
