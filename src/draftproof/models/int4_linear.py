"""Linear layers on four-bit weights for a CPU: groups of 32 weights share a scale and a zero, both in bfloat16.

torch's kernel computes weight = scale · (code - 8) + zero, with bfloat16 inputs and float32 sums. GGUF's Q4_0, Q4_1 and
Q4_K, weight = scale · code + minimum, have this form with zero = minimum + 8 · scale: the codes stay as they are, and
only scale and zero are rounded. A row of inputs gives the same bits for any number of rows beside it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import BFloat16, Float, Int, UInt8
from torch import Tensor, nn

GROUP: Final = 32
"""Weights of a row that share a scale and a zero."""

OUT_MULTIPLE: Final = 16
"""The kernel computes this many outputs at a time."""

MERGE_MULTIPLE: Final = 64
"""Rows that the packed layout interleaves: matrices of multiples of it can be joined and cut without repacking."""

ROWS_AT_ONCE: Final = 1024
"""Rows that are quantised at a time; a multiple of MERGE_MULTIPLE."""

LEVELS: Final = 15
"""The largest code."""


class Int4Weight(NamedTuple):
    """A matrix packed for the kernel. `scales_and_zeros` must be contiguous: the kernel does not look at strides."""

    packed: UInt8[Tensor, "O half"]
    scales_and_zeros: BFloat16[Tensor, "groups O 2"]

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes

    def product(self, x: BFloat16[Tensor, "M I"]) -> BFloat16[Tensor, "M O"]:
        """Return x · weightᵀ; x must be contiguous."""
        result: Tensor = torch._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales_and_zeros)
        return result


def fits_int4(weight: Tensor) -> bool:
    """Return whether a matrix has a shape that the kernel serves."""
    return weight.ndim == 2 and weight.shape[0] % OUT_MULTIPLE == 0 and weight.shape[1] % GROUP == 0


def pack_groups(
    codes: UInt8[Tensor, "O I"], scale: Float[Tensor, "O groups"], minimum: Float[Tensor, "O groups"]
) -> Int4Weight:
    """Pack a matrix of codes, weight = scale · code + minimum; scale and zero are rounded to bfloat16."""
    if not fits_int4(codes) or scale.shape != (codes.shape[0], codes.shape[1] // GROUP) or scale.shape != minimum.shape:
        raise ValueError(
            f"codes {tuple(codes.shape)} with scales {tuple(scale.shape)} and minima {tuple(minimum.shape)}: rows must "
            f"be a multiple of {OUT_MULTIPLE}, columns of {GROUP}, with a scale and a minimum for each {GROUP} columns"
        )
    both = torch.stack([scale.float(), minimum.float() + 8 * scale.float()], -1)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return Int4Weight(packed, both.transpose(0, 1).contiguous().bfloat16())


def quantise_groups(
    weight: Float[Tensor, "O I"],
) -> tuple[UInt8[Tensor, "O I"], Float[Tensor, "O groups"], Float[Tensor, "O groups"]]:
    """Return codes, scales and minima: each group's range is divided evenly, and its weights are rounded to nearest."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = (high - low) / LEVELS
    # Round to the scale and zero that the kernel will have, so that their rounding does not add to the codes'.
    scale, zero = scale.bfloat16().float(), (low + 8 * scale).bfloat16().float()
    steps = (groups - zero[..., None]) / torch.where(scale > 0, scale, 1)[..., None] + 8
    return steps.round().clamp(0, LEVELS).to(torch.uint8).flatten(1), scale, zero - 8 * scale


def int4_weight(weight: Float[Tensor, "O I"]) -> Int4Weight:
    """Quantise and pack a matrix, some rows at a time: what is computed with them takes five times their memory."""
    return join([pack_groups(*quantise_groups(rows)) for rows in weight.detach().split(ROWS_AT_ONCE)])


def unpack(weight: Int4Weight) -> Float[Tensor, "O I"]:
    """Return the matrix that the kernel multiplies with, in float32, read back by products with unit vectors.

    The products are rounded to bfloat16, so the result is the sum of three parts: codes, scales and zeros.
    """
    groups = weight.in_features // GROUP
    scale, zero = weight.scales_and_zeros.float().unbind(-1)
    units = torch.ones_like(weight.scales_and_zeros)
    units[..., 1] = 0  # scale 1 and zero 0: small whole numbers, exact in bfloat16
    eye = torch.eye(weight.in_features, dtype=torch.bfloat16)
    codes = Int4Weight(weight.packed, units).product(eye).float().T.unflatten(1, (groups, GROUP))
    matrix: Tensor = (codes * scale.T[..., None] + zero.T[..., None]).flatten(1)
    return matrix


def codes_of(weight: Int4Weight) -> UInt8[Tensor, "O I"]:
    """Return the codes of a packed matrix whose rows are a multiple of MERGE_MULTIPLE."""
    columns = weight.packed.view(-1, weight.in_features, MERGE_MULTIPLE // 2)
    return _halves(columns)[:, :, _places()].transpose(1, 2).reshape(weight.out_features, weight.in_features)


def _halves(packed: UInt8[Tensor, "*N bytes"]) -> UInt8[Tensor, "*N codes"]:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@cache
def _places() -> Int[Tensor, " rows"]:
    """Return where each row of a block is in a column of the packed layout, learnt from rows packed by their number."""
    rows = torch.arange(MERGE_MULTIPLE, dtype=torch.int32)
    low, high = (
        _halves(torch._convert_weight_to_int4pack_for_cpu(digit[:, None].repeat(1, GROUP), 1).view(GROUP, -1)[0])
        for digit in (rows % 16, rows // 16)
    )
    return (16 * high.int() + low).argsort()


def reordered(weight: Int4Weight, order: Int[Tensor, " O"]) -> Int4Weight:
    """Return the rows of a matrix in another order."""
    packed = torch._convert_weight_to_int4pack_for_cpu(codes_of(weight)[order].int(), 1)
    return Int4Weight(packed, weight.scales_and_zeros[:, order].contiguous())


def join(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Join matrices with the same inputs, one below the other."""
    if any(weight.out_features % MERGE_MULTIPLE for weight in weights[:-1]):
        raise ValueError(f"matrices of {[weight.out_features for weight in weights]} rows cannot be joined: all but "
                         f"the last must have a multiple of {MERGE_MULTIPLE}")  # fmt: skip
    return Int4Weight(
        torch.cat([weight.packed for weight in weights]),
        torch.cat([weight.scales_and_zeros for weight in weights], 1).contiguous(),
    )


def cut(weight: Int4Weight, start: int, stop: int) -> Int4Weight:
    """Return rows of a matrix; they share its codes. Both ends must be multiples of MERGE_MULTIPLE, or the last row."""
    return Int4Weight(weight.packed[start:stop], weight.scales_and_zeros[:, start:stop].contiguous())


def join_linears(linears: Sequence["Int4Linear"]) -> Int4Weight:
    """Join the matrices of layers with the same inputs; the layers then share the joined codes. It is done once."""
    if linears[0].joined is None:
        whole, start = join([linear.int4 for linear in linears]), 0
        for linear in linears:
            linear.int4, linear.joined = cut(whole, start, start + linear.out_features), whole
            start += linear.out_features
    assert linears[0].joined is not None
    return linears[0].joined


class Int4Linear(nn.Module):
    """A linear layer on four-bit weights; inputs are rounded to bfloat16, outputs have the inputs' dtype."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        # Neither parameters nor buffers: code that walks those would convert or move them.
        self._int4: Int4Weight | None = weight
        self._restore: Callable[[], Int4Weight] | None = None
        self.bias = None if bias is None else bias.detach()
        self.joined: Int4Weight | None = None
        """The matrix that this one's codes are a part of; see `join_linears`."""
        self.compiled: Callable[[Tensor], Tensor] | None = None
        """The product as compiled for this machine, if it is (compiled_pass.py)."""
        self.layer_blocks: Any = None
        """On an output projection: the weights of its layer as the compiled pass has them."""

    @property
    def int4(self) -> Int4Weight:
        """Return the matrix in torch's layout, which is made again if it was released."""
        if self._int4 is None:
            assert self._restore is not None
            self._int4 = self._restore()
        return self._int4

    @int4.setter
    def int4(self, weight: Int4Weight) -> None:
        self._int4 = weight

    def release(self, restore: Callable[[], Int4Weight]) -> None:
        """Give up torch's layout: `restore` makes it again, from another layout that is kept.

        A matrix that is a part of a joined one stays: others keep its codes anyway.
        """
        if self.joined is None:
            self._int4, self._restore = None, restore

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if self.compiled is not None:
            return self.compiled(x.float()).to(x.dtype)
        rows = x.reshape(-1, self.in_features).bfloat16().contiguous()
        made = self.int4.product(rows).float()
        return (made if self.bias is None else made + self.bias).to(x.dtype).view(*x.shape[:-1], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Int4Linear":
        """Return itself: it is immutable, so copies of a model share it."""
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def runs_int4(model: nn.Module) -> bool:
    """Return whether some layer of a model is on four-bit weights."""
    return any(isinstance(module, Int4Linear) for module in model.modules())


def pack_int4(model: nn.Module) -> bool:
    """Quantise every linear layer of the model, in place, if all have shapes that fit; return whether they do."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not all(fits_int4(linear.weight) for _, _, linear in found):
        return False
    for parent, name, linear in found:
        setattr(parent, name, Int4Linear(int4_weight(linear.weight), linear.bias))
    return True
