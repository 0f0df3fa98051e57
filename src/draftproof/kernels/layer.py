"""Run the small steps of a decoder layer in one Triton kernel each: sum and norm, rotary embedding, gating."""

import torch
from torch import Tensor

from draftproof.core.device import current_device
from draftproof.kernels.device import layer as device

GATE_BLOCK = 1024
"""Numbers of a row that one program gates."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, round_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x [..., H] normalised by the root of its mean square and scaled by `weight`, or 1 + `weight`.

    out  where the result is written, x itself or a part of it included; None: new memory
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _norm(x, None, weight, out, out, eps, plus_one, round_first)
    return out


def sum_and_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, round_first: bool = True,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + factor · added, and its `rms_norm`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, added.expand(x.shape), weight, total, out, eps, plus_one, round_first, factor=factor)
    return total, out


def norm_and_sum(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, round_first: bool = True
) -> Tensor:
    """Return residual + the `rms_norm` of x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, residual.expand(x.shape), weight, out, out, eps, plus_one, round_first, to=True)
    return out


def _norm(
    x: Tensor, added: Tensor | None, weight: Tensor, total: Tensor, out: Tensor, eps: float, plus_one: bool,
    round_first: bool, *, factor: float = 1.0, to: bool = False,
) -> None:  # fmt: skip
    H = x.shape[-1]
    rows, more = x.reshape(-1, H), None if added is None else added.reshape(-1, H)
    block = _power_of_2(H)
    if rows.shape[0]:
        with current_device(x.device):
            device.rms_norm[(rows.shape[0],)](
                rows, rows if more is None else more, weight, total, out, rows.stride(0),
                0 if more is None else more.stride(0), out.view(-1, H).stride(0), eps, factor, H=H, BLOCK=block,
                PLUS_ONE=plus_one, ROUND_FIRST=round_first, ADD=more is not None and not to, TO=to,
                num_warps=8 if block >= 4096 else 4,
            )  # fmt: skip


def gate(both: Tensor, *, tanh: bool = False) -> Tensor:
    """Return the activation of the first half of [..., 2 I] times the second: SiLU, or GELU approximated by tanh."""
    inner = both.shape[-1] // 2
    rows = both.reshape(-1, 2 * inner)
    out = torch.empty((*both.shape[:-1], inner), dtype=both.dtype, device=both.device)
    if rows.shape[0]:
        with current_device(both.device):
            device.gate[(rows.shape[0], -(-inner // GATE_BLOCK))](
                rows, out, rows.stride(0), inner, BLOCK=GATE_BLOCK, TANH=tanh
            )
    return out


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return heads [B, heads, n, size] rotated by their positions [B or 1, n] times float32 frequencies [size / 2].

    The result lies in memory token by token, as keys are written.
    """
    B, heads, n, size = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    positions = positions.contiguous()
    out = torch.empty((B, n, heads, size), dtype=x.dtype, device=x.device)
    if out.numel():
        with current_device(x.device):
            device.rotate[(B * n, heads)](
                x, positions, frequencies, out, n, 0 if len(positions) == 1 else n, *x.stride()[:3], HALF=size // 2,
                BLOCK=_power_of_2(size // 2), num_warps=1,
            )  # fmt: skip
    return out.transpose(1, 2)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
) -> Tensor:
    """Rotate the queries of [N, (heads + 2 · kv heads) · size] in place, write keys and values, return the queries.

    cos, sin      [N, rotary]: of each token's position; numbers of a head after `rotary` are not rotated
    keys, values  [slots, kv heads, size]: a layer's pool, of which each token writes its slot
    norms         weights of the norms of queries and keys, applied to each head before it is rotated
    """
    (N, _), (_, kv_heads, size), rotary = qkv.shape, keys.shape, cos.shape[-1]
    if N:
        q_weight, k_weight = norms or (qkv, qkv)
        with current_device(qkv.device):
            device.rotate_and_write[(N, heads + 2 * kv_heads)](
                qkv, cos, sin, keys, values, slots, q_weight, k_weight, qkv.stride(0), cos.stride(0), keys.stride(0),
                values.stride(0), eps, HEADS=heads, KV_HEADS=kv_heads, SIZE=size, ROTARY=rotary, HALF=rotary // 2,
                BLOCK=_power_of_2(size), NORM=norms is not None, PLUS_ONE=plus_one, num_warps=1,
            )  # fmt: skip
    return qkv[:, : heads * size].view(N, heads, size)


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
