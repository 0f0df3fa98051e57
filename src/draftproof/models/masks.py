"""Who may look at whom in a pass: positions and masks from lengths, and from the tree where there is one."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.lineage import lineage


@dataclass(frozen=True, slots=True)
class View:
    """`visible[b, t, s]`: may token t of row b look at slot s? `columns`: the position each slot stands for."""

    positions: Int[Tensor, "B T"]
    columns: Int[Tensor, "#B S"]
    visible: Bool[Tensor, "B T S"]

    def windowed(self, size: int) -> "View":
        """Only the last `size` positions, as transformers' sliding window counts them."""
        near = self.positions[:, :, None] - self.columns[:, None, :] < size
        return View(self.positions, self.columns, self.visible & near)

    def chunked(self, size: int) -> "View":
        """Only positions of the same chunk."""
        same = self.positions[:, :, None] // size == self.columns[:, None, :] // size
        return View(self.positions, self.columns, self.visible & same)


def chain(slots: Int[Tensor, "B T"], reach: int) -> View:
    """A token sees what lies before it in its row, and itself."""
    columns = torch.arange(reach, device=slots.device)[None]
    return View(slots, columns, columns[:, None, :] <= slots[:, :, None])


def tree(slots: Int[Tensor, "B T"], reach: int, parents: Int[Tensor, "B K"]) -> View:
    """A slot sees the row before the root, its ancestors, and itself; siblings share a position."""
    T = slots.shape[1]
    up = lineage(parents)  # [B, T, T]
    positions = slots[:, :1] + up.sum(2) - 1
    offset = torch.arange(reach, device=slots.device) - slots[:, :1]  # [B, S], 0 is the root
    inside = (offset >= 0) & (offset < T)
    offset_in = offset.clamp(0, T - 1)
    columns = torch.where(inside, positions.gather(1, offset_in), offset + slots[:, :1])
    related = up.gather(2, offset_in[:, None, :].expand(-1, T, -1))
    return View(positions, columns, (offset < 0)[:, None, :] | (related & inside[:, None, :]))


def additive(visible: Bool[Tensor, "B h T S"], dtype: torch.dtype) -> Float[Tensor, "B h T S"]:
    """The mask as a bias, for attention that adds its mask to the scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
