"""Look cosines and sines up by position: one kernel a pass where a rotary embedding computes them in seven or more.

Only for embeddings in which a position's angles depend on nothing else. Those that change with the length of the text
(dynamic NTK, LongRoPE) give other numbers beside a late position, and stay as they are.
"""

import inspect
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

MOST_BYTES: Final = 64 * 2**20
"""Size of a table, at most: 131 072 positions of 128 numbers in half precision."""

BLOCK: Final = 4096
"""Positions that are computed at a time."""

Angles = tuple[Float[Tensor, "1 N r"], Float[Tensor, "1 N r"]]


class RotaryTable(nn.Module):
    """A rotary embedding by table; `tables` has one for each kind of layer, {None: table} if all are alike."""

    def __init__(self, tables: dict[str | None, Float[Tensor, "P r2"]]) -> None:
        super().__init__()
        self.tables = tables

    @classmethod
    def of(cls, module: nn.Module, positions: int | None, like: Tensor) -> "RotaryTable | None":
        """Return the table of a rotary embedding; None if it has none that always holds, or too large a one.

        positions  the model has positions 0 … positions - 1
        like       a tensor with the device and dtype of hidden states
        """
        if positions is None or module._forward_hooks or module._forward_pre_hooks:
            return None
        kinds = getattr(module, "layer_types", [None]) if _has_kinds(module) else [None]
        try:
            tables = {kind: _table(module, kind, positions, like) for kind in kinds}
        except Exception:  # an embedding that wants other arguments is not what it looks like
            return None
        return None if any(table is None for table in tables.values()) else cls(tables)  # type: ignore[arg-type]

    def forward(self, x: Tensor, position_ids: Int[Tensor, "1 N"], layer_type: str | None = None) -> Angles:
        cos, sin = nn.functional.embedding(position_ids, self.tables[layer_type]).chunk(2, -1)
        return cos, sin


def _has_kinds(module: nn.Module) -> bool:
    return "layer_type" in inspect.signature(module.forward).parameters


def _table(module: nn.Module, kind: str | None, positions: int, like: Tensor) -> Float[Tensor, "P r2"] | None:
    """Return cosines and sines of all positions, side by side; None if they depend on more than the position."""

    def angles(at: Tensor) -> Float[Tensor, "n r2"]:
        given: tuple[Any, ...] = (like, at[None]) if kind is None else (like, at[None], kind)
        cos, sin = module(*given)
        return torch.cat([cos[0], sin[0]], -1).to(like.dtype)

    every = torch.arange(positions, device=like.device)
    first, last = every[: min(8, positions)], every[-1:]
    alone, beside = angles(first), angles(torch.cat([first, last]))
    if alone[0].numel() * alone.element_size() * positions > MOST_BYTES or not torch.equal(alone, beside[:-1]):
        return None
    table = torch.cat([angles(block) for block in every.split(BLOCK)])
    at = torch.randperm(positions, generator=torch.Generator().manual_seed(0))[:64].to(like.device)
    return table if torch.equal(table[at], angles(at)) and torch.equal(table[: len(first)], alone) else None
