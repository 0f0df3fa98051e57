"""Rectangular passes over rows in a KV pool, for models with mixers beside attention.

A mixer reads a rectangle, [rows, tokens]. Attention reads the same tokens as a packed pass in which every row is a
span, so that keys and values stay where they are when rows come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.models.cache import SlotLayer
from draftproof.models.hf import PoolLayer
from draftproof.models.interface import Cache
from draftproof.models.packed import PackedPass, Span, running
from draftproof.models.pool import KVPool, LayerShape, PoolRow

KINDS = (("full_attention", None),)
"""The kinds of attention layers in models with recurrent layers: others are refused (compatibility.py)."""


@dataclass(frozen=True, slots=True)
class RectanglePass:
    """A rectangular pass over rows in a pool, as its attention layers see it.

    packed  the tokens that have slots, row by row
    slots   where their keys and values are written
    inside  which tokens of the rectangle they are; None: all. Padding past the room of a row has no slot: it writes
            nothing, attends to nothing, and is never kept
    """

    shape: tuple[int, int]
    packed: PackedPass
    slots: Int[Tensor, " N"]
    inside: Int[Tensor, " N"] | None

    @classmethod
    def over(cls, rows: Sequence[PoolRow], tokens: Int[Tensor, "B T"]) -> "RectanglePass":
        B, T = tokens.shape
        widths = [min(T, row.extent.slots - row.length) for row in rows]
        spans = [Span(row.extent.start, row.length, width) for row, width in zip(rows, widths, strict=True) if width]
        inside = None
        if min(widths) < T:
            inside = torch.from_numpy(np.concatenate([b * T + np.arange(width) for b, width in enumerate(widths)]))
        packed = PackedPass(tokens.flatten() if inside is None else tokens.flatten()[inside], spans, KINDS)
        return cls((B, T), packed, packed.slots, inside)

    def fold(self, states: Float[Tensor, "B h T d"]) -> Float[Tensor, "1 h N d"]:
        """Return the tokens that have slots, row after row."""
        each = states.transpose(1, 2).flatten(0, 1)
        return (each if self.inside is None else each[self.inside]).transpose(0, 1)[None]

    def attention(
        self,
        query: Float[Tensor, "B h T d"],
        keys: Float[Tensor, "1 g S d"],
        values: Float[Tensor, "1 g S e"],
        mask: Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> Float[Tensor, "B T h e"]:
        """Attend row by row; see `PoolPass`."""
        attended = self.packed.attention(self.fold(query), keys, values, mask, scaling, extras)[0]
        if self.inside is None:
            return attended.view(*self.shape, *attended.shape[1:])
        every = attended.new_zeros((*self.shape, *attended.shape[1:]))
        every.flatten(0, 1)[self.inside] = attended
        return every


class PooledLayer(PoolLayer):
    """One layer of a pool as transformers sees it during rectangular passes."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values, torch.empty(0, dtype=torch.long))

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the running pass to their slots, and return the whole pool."""
        this = running.get()
        assert isinstance(this, RectanglePass)
        self.slots = this.slots
        return super().update(this.fold(key_states), this.fold(value_states))


class PooledSlots:
    """The keys and values of rows in a pool, in the order of a rectangular pass: what a `SlotCache` is without a pool.

    Rows are taken, joined and shortened as integers. They have the room that whoever owns them has made.
    """

    def __init__(self, pool: KVPool, rows: Sequence[PoolRow]) -> None:
        self._pool, self._rows = pool, list(rows)
        self.width = 0
        """Tokens in each row of the last pass."""
        self.layers = [PooledLayer(keys, values) for keys, values in zip(pool.keys, pool.values, strict=True)]

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of tokens in each row. Assigning smaller lengths truncates the rows."""
        return torch.tensor(self.read_lengths(), dtype=torch.long)

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        for row, length in zip(self._rows, lengths.tolist(), strict=True):
            if length > row.length:
                raise ValueError(f"a row holds {row.length} tokens and cannot be shortened to {length}")
            row.length = length

    def read_lengths(self) -> list[int]:
        # Also of rows that have just left the pool: their states are settled with those of the others.
        return [row.length for row in self._rows]

    def reserve(self, width: int, limit: int | None = None) -> None:
        """Begin a pass over `width` tokens of each row; refuse a row that already holds `limit` tokens."""
        longest = max(self.read_lengths())
        if limit is not None and longest >= limit:
            raise ValueError(f"a row holds {longest} tokens, all of the model's {limit} positions: take it out first")
        self.width = width

    def rectangle(self, tokens: Int[Tensor, "B T"]) -> RectanglePass:
        """Return a pass over these tokens, which follow those of each row."""
        return RectanglePass.over(self._rows, tokens)

    def keep(self, counts: Int[Tensor, " B"]) -> None:
        """Lengthen each row by `counts` tokens of the last pass, its first ones."""
        for row, count in zip(self._rows, counts.tolist(), strict=True):
            if not 0 <= count <= min(self.width, row.extent.slots - row.length):
                raise ValueError(
                    f"counts {counts.tolist()} must lie within the last pass's {self.width} tokens, and the room of "
                    f"each row: one holds {row.length} of {row.extent.slots}"
                )
            row.length += count

    def take(self, rows: Sequence[int]) -> "PooledSlots":
        """Return these rows, in this order. Nothing is copied."""
        return PooledSlots(self._pool, [self._rows[i] for i in rows])

    def join(self, other: "PooledSlots | Cache") -> "PooledSlots":
        """Return these rows followed by the rows of `other`. Nothing is copied."""
        if not isinstance(other, PooledSlots) or other._pool is not self._pool:
            raise ValueError("rows of a pool can be joined only with rows of the same pool")
        return PooledSlots(self._pool, [*self._rows, *other._rows])


@dataclass(slots=True)
class OneTokenPass:
    """A pass over the only token of one row, which attends to itself. It counts the layers that ask."""

    layers: int = 0

    def attention(
        self,
        query: Float[Tensor, "1 h 1 d"],
        keys: Float[Tensor, "1 g S d"],
        values: Float[Tensor, "1 g S e"],
        mask: Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> Float[Tensor, "1 1 h e"]:
        self.layers += 1
        return values[:, :, :1].repeat_interleave(query.shape[1] // values.shape[1], 1).transpose(1, 2)


def written_shape(layer: SlotLayer) -> LayerShape:
    """Return the sizes of what a layer has written; zero if it has written nothing."""
    if not layer.is_initialized:
        return LayerShape(0, 0, 0, torch.float32)
    heads, size = layer.keys.shape[2:]
    return LayerShape(heads, size, layer.values.shape[3], layer.keys.dtype)
