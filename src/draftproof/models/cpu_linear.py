"""Pack linear layers for oneDNN, in float32 or bfloat16, so that on a CPU five rows cost about as much as one.

`F.linear` passes a weight matrix in row order, and for a few rows oneDNN then takes a slow path or reorders the weights
in every call. Packing reorders them once. It replaces the layers and drops the original weights, so it is only for
models that draftproof loaded itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

LAYOUT_ROWS = 8
"""Rows for which oneDNN chooses the layout. It serves any number: from 1 to 128 rows none was slower than unpacked."""

EXACT_ROWS = 16
"""Rows up to which a product has as many as its input has; larger ones are padded, see `padded_rows`."""

COARSEST_STEP = 32
"""Rows by which the numbers of rows of large products differ."""

BEFORE_A_STEP = 42
"""Rows up to which oneDNN multiplies a narrow matrix (up to about 1000 outputs) in proportion to them, with AVX-512:
from 44 on it takes as long as for 64, half as long again."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The linear layers replaced by packing, and the memory added.

    A weight that another module also uses (an embedding tied to the output layer) stays, so its packed copy is extra.
    """

    layers: int
    added_bytes: int


def packable(model: nn.Module) -> bool:
    """Return whether this build of torch can pack the model: oneDNN, and float32 weights on a CPU."""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    )


def pack(model: nn.Module) -> Packing:
    """Replace every linear layer of the model, in place, by a packed float32 one."""
    if not packable(model):
        raise ValueError(
            f"{type(model).__name__} cannot be packed: it must be float32 on a CPU, in a torch with oneDNN"
        )
    linears = _linears(model)
    added = 0
    shared = _weights_of_other_modules(model)
    for parent, name, linear in linears:
        setattr(parent, name, PackedLinear(linear))
        added += linear.weight.nbytes if id(linear.weight) in shared else 0
    return Packing(len(linears), added)


def bfloat16_packable(model: nn.Module) -> bool:
    """Return whether the model can be packed and the CPU multiplies bfloat16 natively; other CPUs would be slower."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return packable(model) and supported is not None and bool(supported())


def pack_bfloat16(model: nn.Module) -> None:
    """Replace every linear layer of the model, in place, by a packed bfloat16 one; refuse layers with a bias."""
    for parent, name, linear in _linears(model):
        if linear.bias is not None:
            raise ValueError(f"{name} has a bias, and a bfloat16 layer has none")
        setattr(parent, name, BFloat16Linear(linear.weight))


class PackedLinear(nn.Module):
    """A linear layer on packed float32 weights, for inference on a CPU.

    Once it is joined with others (`join`), its weights are a part of theirs.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Neither a parameter nor a buffer: it is opaque, and code that walks those reads their storage. In an object of
        # its own: where weights lie is not a change of the model (fingerprint.py).
        self.place = _Place(torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS))
        self._doubles = not _row_alone_is_the_same(self.packed, self.in_features)

    @property
    def packed(self) -> Tensor:
        """Return the weights; `to_dense()` of them is a matrix."""
        place = self.place
        if place.packed is not None:
            return place.packed
        assert place.part is not None
        return place.part.whole.packed.to_dense()[place.part.start : place.part.stop]

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        packed, part = self.place.packed, self.place.part
        if packed is None:
            assert part is not None
            return part.product(x)
        if self._doubles and x.numel() == self.in_features:
            both = x.reshape(1, -1).expand(2, -1)
            return _packed_linear(both, packed, self.bias)[:1].view(*x.shape[:-1], -1)
        return _packed_linear(x, packed, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        """Return itself: what it computes never changes, so copies of a model share it."""
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Part(NamedTuple):
    """A part of a joined layer: its outputs from `start` to `stop`."""

    whole: PackedLinear
    start: int
    stop: int

    def product(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        """Return the part's outputs; parts that are asked one after the other for the same input share a product."""
        last = getattr(_LAST, "product", None)
        if last is None or last[0] is not self.whole or last[1] is not x:
            last = self.whole, x, self.whole(x)
        # Whoever asks for the last part needs the product no more.
        _LAST.product = None if self.stop == self.whole.out_features else last
        made: Tensor = last[2][..., self.start : self.stop]
        return made


@dataclass(slots=True)
class _Place:
    """Where a layer's weights are: packed, or a part of a joined layer."""

    packed: Tensor | None
    part: Part | None = None


_LAST: Final = local()
"""The last joined layer of which a part was asked for, with its input and its product, in each thread."""


def joinable(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers are packed ones that can be joined: with one input size, and all with a bias or none."""
    packed = [layer for layer in layers if type(layer) is PackedLinear]
    kinds = {(layer.in_features, layer.bias is None) for layer in packed}
    wholes = {None if layer.place.part is None else layer.place.part.whole for layer in packed}
    return len(packed) == len(layers) and len(kinds) == len(wholes) == 1


@torch.no_grad()
def join(layers: Sequence[PackedLinear]) -> PackedLinear:
    """Join packed layers that read the same input into one, which has the only copy of their weights.

    They compute what they did, as parts of it. It is done once: layers that were joined return what they are parts of.
    """
    if (part := layers[0].place.part) is not None:
        return part.whole
    joined = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.packed.to_dense() for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    whole, start = PackedLinear(joined), 0
    for layer in layers:
        part = Part(whole, start, start + layer.out_features)
        layer.place.part, layer.place.packed = part, None
        start = part.stop
    return whole


class BFloat16Linear(nn.Module):
    """A linear layer without bias on packed bfloat16 weights; float32 in and out."""

    def __init__(self, weight: Float[Tensor, "O I"]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Neither a parameter nor a buffer: it is opaque, and code that walks those reads their storage.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), LAYOUT_ROWS)
        self._doubles = not _row_alone_is_the_same(self.packed, self.in_features)

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        narrow = x.bfloat16()
        if self._doubles and x.numel() == self.in_features:
            both = narrow.reshape(1, -1).expand(2, -1)
            return _packed_linear(both, self.packed, None)[:1].view(*x.shape[:-1], -1).float()
        return _packed_linear(narrow, self.packed, None).float()

    def __deepcopy__(self, memo: dict[int, Any]) -> "BFloat16Linear":
        """Return itself: it is immutable, so copies of a model share it."""
        return self


def _row_alone_is_the_same(packed: Tensor, inputs: int) -> bool:
    """Return whether a row alone gives the bits that it gives beside others; if not, a single row is doubled.

    oneDNN sums in another order for some shapes of a single row. From two rows on, no shape was found where a row's
    bits depend on how many there are, so that a text does not depend on the rows computed beside it.
    """
    rows = torch.randn((8, inputs), generator=torch.Generator().manual_seed(0)).to(packed.dtype)
    alone = torch.cat([_packed_linear(row[None], packed, None) for row in rows])
    return torch.equal(alone, _packed_linear(rows, packed, None))


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // x.shape[-1]
    wanted = padded_rows(rows)
    if wanted == rows:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result
    padded = x.new_zeros((wanted, x.shape[-1]))
    padded[:rows] = x.reshape(rows, -1)
    made: Tensor = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
    return made[:rows].view(*x.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """Return the number of rows with which a product of so many is computed: 5 % more on average.

    oneDNN compiles a kernel of 0.6 MB for every number of rows and shape of weights, and keeps 1024 of them. A server
    meets hundreds of numbers.
    """
    if rows <= EXACT_ROWS:
        return rows
    step = min(COARSEST_STEP, (1 << (rows - 1).bit_length()) // 16)
    padded = -(-rows // step) * step
    return BEFORE_A_STEP if rows <= BEFORE_A_STEP < padded else padded


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    # Not subclasses of Linear: they compute something else, or store their weights differently.
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def _weights_of_other_modules(model: nn.Module) -> set[int]:
    """Return the ids of all weights that a module other than a linear layer uses."""
    return {
        id(weight)
        for module in model.modules()
        if type(module) is not nn.Linear
        for weight in module.parameters(recurse=False)
    }
