"""Weights laid out once as oneDNN wants them, so that on a CPU five rows cost about as much as one.

`F.linear` hands a weight matrix to the library in row order, and for a few rows the library then takes a slow path or
rearranges the weights in every call. Packing does that once. Only ever for models that we loaded ourselves: the layers
are replaced, and the original weights are let go.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

ROWS = 8
"""The row count that the layout is made for. It serves all: from 1 to 128 rows none was slower than unpacked."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What packing did: linear layers replaced, and the memory it costs on top. A weight that something else still
    uses (an embedding tied to the head) stays, and its packed twin is what is added."""

    layers: int
    added_bytes: int


class PackedLinear(nn.Module):
    """A linear layer on packed weights: float32, CPU, without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # An opaque tensor: as a parameter or buffer it would break whoever asks those for their storage.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        return _linear(x, self.packed, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        """Nothing here ever changes, so copies of a model share it."""
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def packable(model: nn.Module) -> bool:
    """Can this build of torch pack, and is the model one that it can pack: float32 on a CPU?"""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    )


def pack(model: nn.Module) -> Packing:
    """Replace every linear layer of a model that belongs to us by its packed twin."""
    if not packable(model):
        raise ValueError(
            f"{type(model).__name__} cannot be packed: it must be float32 on a CPU, in a torch with oneDNN"
        )
    linears = _linears(model)
    added = 0
    elsewhere = _used_elsewhere(model)
    for parent, name, linear in linears:
        setattr(parent, name, PackedLinear(linear))
        added += linear.weight.nbytes if id(linear.weight) in elsewhere else 0
    return Packing(len(linears), added)


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    # Subclasses of Linear compute something else, or hold their weights in their own way.
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def _used_elsewhere(model: nn.Module) -> set[int]:
    return {
        id(weight)
        for module in model.modules()
        if type(module) is not nn.Linear
        for weight in module.parameters(recurse=False)
    }


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


class HalvedLinear(nn.Module):
    """A linear layer without bias on packed bfloat16 weights."""

    def __init__(self, weight: Float[Tensor, "O I"]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # An opaque tensor: as a parameter or buffer it would break whoever asks those for their storage.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), ROWS)

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, None, "none", [], "")
        return made.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HalvedLinear":
        """Nothing here ever changes, so copies share it."""
        return self


def halvable(model: nn.Module) -> bool:
    """Is this a CPU that multiplies bfloat16 by itself? Others would take longer than for float32."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return packable(model) and supported is not None and bool(supported())


def halve(model: nn.Module) -> None:
    """Replace every linear layer of a model that belongs to us by its halved twin."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if child.bias is not None:
                    raise ValueError(f"{name} has a bias, and a halved layer has none")
                setattr(parent, name, HalvedLinear(child.weight))
