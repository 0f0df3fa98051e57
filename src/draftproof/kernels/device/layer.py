"""The small steps of a decoder layer, each one kernel: sum and norm, rotary embedding with its write, gating."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def rms_norm(x, added, weight, total, out, stride, added_stride, out_stride, eps, factor, H: tl.constexpr,
             BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, ROUND_FIRST: tl.constexpr, ADD: tl.constexpr,
             TO: tl.constexpr):  # fmt: skip
    """Normalise one row by the root of its mean square, and scale it by `weight`, or by 1 + `weight`.

    ROUND_FIRST: the normalised numbers are rounded to the dtype before they are scaled, as Llama does.
    ADD: the row is x + factor · added, rounded to the dtype after each step, and is written to `total`.
    TO: the result is what is made of x, added to `added`.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < H
    numbers = tl.load(x + row * stride + i, mask=inside, other=0.0)
    more = numbers
    if ADD or TO:
        more = tl.load(added + row * added_stride + i, mask=inside, other=0.0)
    if ADD:
        scaled = (more.to(tl.float32) * factor).to(numbers.dtype)
        numbers = (numbers.to(tl.float32) + scaled.to(tl.float32)).to(numbers.dtype)
        tl.store(total + row * H + i, numbers, mask=inside)
    wide = numbers.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    scale = tl.load(weight + i, mask=inside, other=0.0)
    if PLUS_ONE:
        made = normal * (1.0 + scale.to(tl.float32))
    elif ROUND_FIRST:
        made = scale.to(tl.float32) * normal.to(numbers.dtype).to(tl.float32)
    else:
        made = scale.to(tl.float32) * normal
    if TO:
        made = made.to(numbers.dtype).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row * out_stride + i, made.to(numbers.dtype), mask=inside)


@triton.jit(do_not_specialize=["n", "position_stride"])
@no_type_check
def rotate(x, positions, frequencies, out, n, position_stride, row_stride, head_stride, token_stride,
           HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rotate one head of one token by its position's angles: pairs are half a head apart. Grid: (B · n, heads)."""
    at, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, t = at // n, at % n
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    position = tl.load(positions + b * position_stride + t).to(tl.float32)
    angle = position * tl.load(frequencies + i, mask=inside, other=0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    source = x + b * row_stride + head * head_stride + t * token_stride + i
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    one, other = first.to(tl.float32), second.to(tl.float32)
    target = out + (at * heads + head) * 2 * HALF + i
    tl.store(target, (one * c - other * s).to(first.dtype), mask=inside)
    tl.store(target + HALF, (other * c + one * s).to(first.dtype), mask=inside)


@triton.jit
@no_type_check
def gate(both, out, stride, inner, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Multiply the second half of a row by the activation of its first half: SiLU, or GELU by tanh."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    first = tl.load(both + row * stride + i, mask=inside, other=0.0)
    second = tl.load(both + row * stride + inner + i, mask=inside, other=0.0)
    x = first.to(tl.float32)
    if TANH:
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x * tl.sigmoid(2.0 * y)  # 0.5 · (1 + tanh y) = sigmoid(2 y)
    else:
        active = x * tl.sigmoid(x)
    # rounded in between, as two kernels would
    made = active.to(first.dtype).to(tl.float32) * second.to(tl.float32)
    tl.store(out + row * inner + i, made.to(first.dtype), mask=inside)


@triton.jit
@no_type_check
def rotate_and_write(qkv, cos, sin, keys, values, slots, q_weight, k_weight, stride, cos_stride, key_stride,
                     value_stride, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
                     ROTARY: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
                     PLUS_ONE: tl.constexpr):  # fmt: skip
    """Rotate one head of one token; a query stays where it is, a key and a value go to their slot of the pool.

    NORM: queries and keys are normalised first, head by head (Qwen 3, Gemma 3).
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    source = qkv + token * stride + head * SIZE
    x = tl.load(source + i, mask=inside, other=0.0)
    dtype = x.dtype
    slot = tl.load(slots + token)
    if head >= HEADS + KV_HEADS:
        tl.store(values + slot * value_stride + (head - HEADS - KV_HEADS) * SIZE + i, x, mask=inside)
    else:
        # the other number of each pair: x[i + HALF], or -x[i - HALF]
        rotated = i < ROTARY
        partner = tl.where(i < HALF, i + HALF, i - HALF)
        other = tl.load(source + partner, mask=inside & rotated, other=0.0)
        wide, wide_other = x.to(tl.float32), other.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
            weight = q_weight if head < HEADS else k_weight
            own = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
            paired = tl.load(weight + partner, mask=inside & rotated, other=0.0).to(tl.float32)
            if PLUS_ONE:
                own, paired = own + 1.0, paired + 1.0
            wide = (wide * scale * own).to(dtype).to(tl.float32)
            wide_other = (wide_other * scale * paired).to(dtype).to(tl.float32)
        c = tl.load(cos + token * cos_stride + i, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + token * cos_stride + i, mask=rotated, other=0.0).to(tl.float32)
        made = (wide * c + tl.where(i < HALF, -wide_other, wide_other) * s).to(dtype)
        tl.debug_barrier()  # every lane has read its pair before it is overwritten
        if head < HEADS:
            tl.store(source + i, made, mask=inside)
        else:
            tl.store(keys + slot * key_stride + (head - HEADS) * SIZE + i, made, mask=inside)
