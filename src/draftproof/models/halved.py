"""Linear layers that read their weights in bfloat16, packed for oneDNN; what goes in and comes out is float32.

A drafter reads all its weights for every token, and reading is what takes the time: half the bytes, half the time.
What comes out is rounded to 8 bits. A drafter can afford that, since its law is whatever it drew from; a target cannot.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.models.packed import ROWS, packable


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
