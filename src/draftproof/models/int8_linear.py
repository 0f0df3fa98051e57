"""Linear layers on eight-bit weights for a CPU: a scale for each output, and inputs of two eight-bit parts.

oneDNN multiplies bytes, reads the weights once for any number of rows, and returns float32: for an output layer, whose
logits must not be rounded to bfloat16. An input row is split into a coarse and a fine part, each of eight bits with a
scale of its own row, so that it keeps about 15 bits and no row depends on its neighbours.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

LEVELS: Final = 127
"""The largest code; codes are symmetric."""

ZERO_POINT: Final = 128
"""oneDNN's input bytes are unsigned: a code is stored as code + 128."""

FINE: Final = 2 * LEVELS
"""Steps of the fine part in a step of the coarse part, whose rounding error is half a step at most."""


def quantise_rows(weight: Float[Tensor, "O I"]) -> tuple[Int8[Tensor, "O I"], Float[Tensor, " O"]]:
    """Return codes and scales, weight = scale · code: each row's largest weight gets the largest code."""
    wide = weight.detach().float()
    scale = wide.abs().amax(1).clamp_min(1e-30) / LEVELS
    return (wide / scale[:, None]).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer on eight-bit weights; float32 in and out.

    table  the float matrix that it was made from, if another module keeps it anyway (tied embeddings)
    """

    def __init__(
        self,
        codes: Int8[Tensor, "O I"],
        scale: Float[Tensor, " O"],
        bias: Tensor | None = None,
        *,
        table: Float[Tensor, "O I"] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        # Neither parameters nor buffers: the packed codes are opaque, and code that walks those reads their storage.
        self._codes: Tensor | None = codes
        self._restore: Callable[[], Tensor] | None = None
        self._packed: Tensor | None = None
        self.compiled: Any = None
        """The product as compiled for this machine, if it is (compiled_pass.py)."""
        self.scale, self.bias = scale, None if bias is None else bias.detach()
        self.weight = table
        self._zero_points = torch.zeros(self.out_features, dtype=torch.long)

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        rows = x.reshape(-1, self.in_features).float()
        step = rows.abs().amax(1, keepdim=True).clamp_min_(1e-30).div_(LEVELS)
        steps = rows / step
        coarse = steps.round()
        fine = steps.sub_(coarse).mul_(FINE).round_()
        bytes_ = torch.cat([coarse, fine]).add_(ZERO_POINT).to(torch.uint8)
        made = self._product(bytes_)
        result = made[: len(rows)].add_(made[len(rows) :], alpha=1 / FINE).mul_(step)
        return (result if self.bias is None else result.add_(self.bias)).view(*x.shape[:-1], -1)

    @property
    def codes(self) -> Int8[Tensor, "O I"]:
        """Return the codes, read back from another layout if they were released."""
        if self._codes is not None:
            return self._codes
        assert self._restore is not None
        return self._restore()

    def release(self, restore: Callable[[], Int8[Tensor, "O I"]]) -> None:
        """Give up the codes: `restore` reads them from another layout that is kept."""
        self._codes, self._restore = None, restore

    @property
    def packed(self) -> Tensor:
        """Return the codes as oneDNN wants them, made when they are first used: a compiled pass does not use them."""
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return self._packed

    def _product(self, codes: Tensor) -> Tensor:
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, ZERO_POINT, self.packed, self.scale, self._zero_points, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Int8Linear":
        """Return itself: it is immutable, so copies of a model share it."""
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_int8(model: nn.Module) -> None:
    """Quantise every linear layer of the model, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(*quantise_rows(child.weight), child.bias))
