"""Run the small steps of a decoder layer on a CPU, in float32, in one call each: RMSNorm, rotary embedding, gating.

The functions are those of kernels/layer.py. Their loops are compiled (compiled/layer.py); without numba they are few
calls of torch.
"""

from collections.abc import Sequence
from ctypes import addressof, c_float, c_int64
from functools import cache
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import gelu, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from draftproof.models.packed import compiled_layer

FEW_NUMBERS: Final = 8192
"""Numbers up to which a call runs on one thread: sharing so few takes longer than computing them."""


def rms_norm(
    x: Float[Tensor, "*B H"],
    weight: Float[Tensor, " H"],
    eps: float,
    *,
    plus_one: bool = False,
    round_first: bool = True,
    out: Float[Tensor, "*B H"] | None = None,
) -> Float[Tensor, "*B H"]:
    """Return x normalised by the root of its mean square and scaled by `weight`, or 1 + `weight`.

    round_first  is for narrower dtypes: float32 is rounded nowhere
    out          where the result is written, x itself or a part of it included; None: new memory
    """
    if out is not None:
        return out.copy_(rms_norm(x, weight, eps, plus_one=plus_one))
    compiled, size = compiled_layer(), x.shape[-1]
    if compiled is None:
        return torch_rms_norm(x, (size,), weight + 1 if plus_one else weight, eps)
    x, out = x.contiguous(), torch.empty(x.shape)
    rows = x.numel() // size
    numbers = (rows, x.data_ptr(), size, weight.data_ptr(), out.data_ptr(), size, _at(eps), plus_one)
    _start(compiled.NORM, numbers, out.numel())
    return out


def sum_and_norm(
    x: Float[Tensor, "*B H"],
    added: Float[Tensor, "*B H"],
    weight: Float[Tensor, " H"],
    eps: float,
    *,
    plus_one: bool = False,
    round_first: bool = True,
    factor: float = 1.0,
) -> tuple[Float[Tensor, "*B H"], Float[Tensor, "*B H"]]:
    """Return x + factor · added, and its `rms_norm`: two calls, of which the sum is the short one."""
    total = x + (added if factor == 1 else added * factor)
    return total, rms_norm(total, weight, eps, plus_one=plus_one, round_first=round_first)


def norm_and_sum(
    residual: Float[Tensor, "*B H"],
    x: Float[Tensor, "*B H"],
    weight: Float[Tensor, " H"],
    eps: float,
    *,
    plus_one: bool = False,
    round_first: bool = True,
) -> Float[Tensor, "*B H"]:
    """Return residual + the `rms_norm` of x."""
    return residual + rms_norm(x, weight, eps, plus_one=plus_one, round_first=round_first)


def gate(both: Float[Tensor, "*B wide"], *, tanh: bool = False) -> Float[Tensor, "*B I"]:
    """Return the activation of the first half of each row times the second: SiLU, or GELU approximated by tanh."""
    compiled, size = compiled_layer(), both.shape[-1] // 2
    if compiled is None:
        first, second = both.chunk(2, -1)
        return (gelu(first, approximate="tanh") if tanh else silu(first)).mul_(second)
    both, out = both.contiguous(), torch.empty((*both.shape[:-1], size))
    numbers = (both.numel() // (2 * size), both.data_ptr(), 2 * size, out.data_ptr(), size, tanh)
    _start(compiled.GATE, numbers, out.numel())
    return out


def rotate_and_write(
    qkv: Float[Tensor, "N wide"],
    cos: Float[Tensor, "N rotary"],
    sin: Float[Tensor, "N rotary"],
    keys: Float[Tensor, "slots g d"],
    values: Float[Tensor, "slots g d"],
    slots: Int[Tensor, " N"],
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
) -> Float[Tensor, "N h d"]:
    """Return the queries of [N, (heads + 2 · kv heads) · size], rotated; write keys and values to their slots.

    cos, sin      of each token's position; numbers of a head after `rotary` are not rotated
    keys, values  a layer's pool, of which each token writes its slot
    norms         weights of the norms of queries and keys, applied to each head before it is rotated
    """
    compiled, (N, _), (_, shared, size), rotary = compiled_layer(), qkv.shape, keys.shape, cos.shape[1]
    if compiled is None:
        q, k, v = qkv.view(N, -1, size).split([heads, shared, shared], 1)
        if norms is not None:
            q, k = (rms_norm(x, w, eps, plus_one=plus_one) for x, w in zip((q, k), norms, strict=True))
        keys.index_copy_(0, slots, _rotated(k, cos, sin))
        values.index_copy_(0, slots, v)
        return _rotated(q, cos, sin)
    cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty((N, heads, size))
    q_weight, k_weight = (0, 0) if norms is None else (each.data_ptr() for each in norms)
    numbers = (N, qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), keys.data_ptr(),
               keys.stride(0), values.data_ptr(), values.stride(0), out.data_ptr(), heads, shared, size, rotary,
               q_weight, k_weight, _at(eps), plus_one)  # fmt: skip
    _start(compiled.ROTATE, numbers, qkv.numel())
    return out


def _rotated(x: Float[Tensor, "N h d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "N h d"]:
    turned, rest = x.split([cos.shape[1], x.shape[2] - cos.shape[1]], 2)
    first, second = turned.chunk(2, 2)
    made = turned * cos[:, None] + torch.cat([-second, first], 2) * sin[:, None]
    return torch.cat([made, rest], 2) if rest.shape[2] else made


def _start(address: int, numbers: Sequence[int], work: int) -> None:
    """Run a compiled region on the threads that torch uses, or on this one if there is little work."""
    from draftproof.core.simd import START

    call = (c_int64 * len(numbers))(*numbers)
    START(address, call, 1 if work <= FEW_NUMBERS else torch.get_num_threads(), 0)


@cache
def _at(number: float) -> int:
    """Return the address of a float32 that is kept for as long as the process runs."""
    _KEPT.append(c_float(number))
    return addressof(_KEPT[-1])


_KEPT: Final[list[c_float]] = []
