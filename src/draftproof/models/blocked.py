"""Lay out weights for compiled products: blocks of sixteen outputs, so that a pass reads memory in order.

A layer that is laid out gives up torch's layout of its weights, which would take as much memory again; it is made anew
where something else than a compiled pass asks for it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from draftproof.models.int4_linear import GROUP, MERGE_MULTIPLE, Int4Linear, Int4Weight, codes_of
from draftproof.models.large_pages import WEIGHTS

BLOCK: Final = 16
"""Outputs of a register."""

PAIR: Final = 2 * BLOCK
"""Outputs that are computed at a time."""

CODE_BYTES: Final = GROUP * BLOCK // 2
"""Bytes of a group of a block that are codes; scales and zeros follow."""

ROWS_AT_ONCE: Final = 1024
"""Rows that are laid out at a time: temporaries take several times their memory."""

Blocks = UInt8[Tensor, "blocks groups bytes"]


def blocked_int4(weight: Int4Weight, second: Int4Weight | None = None) -> Blocks:
    """Lay out four-bit weights in blocks of sixteen outputs; blocks of two matrices alternate.

    A group of a block is 64 words, in which inputs 8 q + 2 j + p have the bits from 4 j + 16 p on of word q · 16 + o,
    then sixteen scales and sixteen zeros.
    """
    weights = [weight] if second is None else [weight, second]
    made = _room(weight.out_features, weight.in_features, len(weights))
    for index, each in enumerate(weights):
        _fill(made[index :: len(weights)], each)
    return made


def _room(outputs: int, inputs: int, times: int = 1) -> Blocks:
    """Return room for so many matrices."""
    return WEIGHTS.empty((times * outputs // BLOCK, inputs // GROUP, CODE_BYTES + 4 * BLOCK), torch.uint8)


def _fill(blocks: Blocks, weight: Int4Weight) -> None:
    for start in range(0, weight.out_features, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, weight.out_features)
        blocks[start // BLOCK : stop // BLOCK] = _blocks(weight, start, stop)


def _blocks(weight: Int4Weight, start: int, stop: int) -> Blocks:
    groups = weight.in_features // GROUP
    part = Int4Weight(weight.packed[start:stop], weight.scales_and_zeros[:, start:stop])
    codes = codes_of(part).view(-1, BLOCK, groups, 4, 4, 2)
    halves = codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)  # bytes of two codes: j = 0 and 1, or 2 and 3
    words = halves.transpose(4, 5).reshape(-1, BLOCK, groups, 4, 4)  # bytes (p, j // 2): a word, low byte first
    both = part.scales_and_zeros.reshape(groups, -1, BLOCK, 2).permute(1, 0, 3, 2).contiguous().view(torch.uint8)
    return torch.cat([words.permute(0, 2, 3, 1, 4).reshape(-1, groups, CODE_BYTES), both.flatten(2)], 2)


def unblocked_int4(blocks: Blocks) -> Int4Weight:
    """Return torch's layout of a matrix that was laid out by `blocked_int4`."""
    count, groups, _ = blocks.shape
    halves = blocks[..., :CODE_BYTES].reshape(count, groups, 4, BLOCK, 2, 2).permute(0, 3, 1, 2, 5, 4)
    codes = torch.stack([halves & 15, halves >> 4], 5).reshape(count * BLOCK, groups * GROUP)
    both = blocks[..., CODE_BYTES:].contiguous().view(torch.bfloat16).view(count, groups, 2, BLOCK)
    scales_and_zeros = both.permute(1, 0, 3, 2).reshape(groups, count * BLOCK, 2).contiguous()
    return Int4Weight(torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1), scales_and_zeros)


def blocked_int8(codes: Int8[Tensor, "O I"]) -> Int8[Tensor, "blocks pairs 16 2"]:
    """Lay out eight-bit weights in blocks of sixteen outputs: for each pair of inputs 32 bytes."""
    outputs, inputs = codes.shape
    made = WEIGHTS.empty((-(-outputs // PAIR) * PAIR // BLOCK, inputs // 2, BLOCK, 2), torch.int8)
    made[outputs // BLOCK :] = 0
    for start in range(0, outputs, ROWS_AT_ONCE):
        part = codes[start : start + ROWS_AT_ONCE]
        padded = nn.functional.pad(part, (0, 0, 0, -len(part) % BLOCK)).view(-1, BLOCK, inputs // 2, 2)
        made[start // BLOCK : start // BLOCK + len(padded)] = padded.transpose(1, 2)
    return made


def unblocked_int8(blocks: Int8[Tensor, "blocks pairs 16 2"], outputs: int) -> Int8[Tensor, "O I"]:
    """Return the codes of a matrix that was laid out by `blocked_int8`."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs].contiguous()


def lay_out(linear: Int4Linear) -> Blocks:
    """Lay out a linear layer, which gives up torch's layout."""
    blocks = blocked_int4(linear.int4)
    linear.release(partial(unblocked_int4, blocks))
    return blocks


def layer_blocks(layer: Any) -> list[Tensor | None]:
    """Lay out the weights of a Llama layer in the order of decoder.LAYER_FIELDS, once; copies of a model share them."""
    attention, mlp = layer.self_attn, layer.mlp
    if attention.o_proj.layer_blocks is None:
        attention.o_proj.layer_blocks = [
            plain(layer.input_layernorm.weight),
            _joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            lay_out(attention.o_proj),
            plain(layer.post_attention_layernorm.weight),
            _alternating(mlp.gate_proj, mlp.up_proj),
            lay_out(mlp.down_proj),
        ]
    blocks: list[Tensor | None] = attention.o_proj.layer_blocks
    return blocks


def _joined(linears: Sequence[Int4Linear]) -> Blocks:
    whole = _room(sum(linear.out_features for linear in linears), linears[0].in_features)
    parts = whole.split([linear.out_features // BLOCK for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        _fill(part, linear.int4)
        linear.release(partial(unblocked_int4, part))
    return whole


def alternating_halves(blocks: Tensor) -> Tensor:
    """Return the blocks of a matrix so that those of its first and second half alternate."""
    made = WEIGHTS.empty(tuple(blocks.shape), blocks.dtype)
    made[0::2], made[1::2] = blocks.chunk(2)
    return made


def _alternating(gate: Int4Linear, up: Int4Linear) -> Blocks:
    blocks = blocked_int4(gate.int4, up.int4)
    gate.release(partial(unblocked_int4, blocks[0::2]))
    up.release(partial(unblocked_int4, blocks[1::2]))
    return blocks


def can_lay_out(linear: Any) -> bool:
    """Return whether a module is a four-bit layer that compiled products serve."""
    return type(linear) is Int4Linear and linear.bias is None and linear.out_features % MERGE_MULTIPLE == 0


def can_lay_out_layer(layer: Any) -> bool:
    """Return whether all linear layers of a Llama layer can be laid out."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    return all(can_lay_out(each) for each in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def plain(weight: Tensor) -> Float[Tensor, "..."]:
    """Return a weight in float32, in order."""
    return weight.detach().float().contiguous()
