"""A pass over a KV pool on a GPU: rows of one width, each with its own length, which only the device reads.

Its shapes depend on the number of rows and the width alone. So one CUDA graph serves rows while they grow, and while
others enter and leave.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.tree import lineage
from draftproof.models.cuda_graphs import CapturedGraphs

if TYPE_CHECKING:
    from draftproof.kernels.round_steps import Layout

SIZE_CLASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that passes are recorded for; others are padded to the next one, or to a multiple of the last."""

WIDEST: Final = 64
"""Tokens of a row in a pass, at most, as in the attention kernel; longer ones are read in packed passes."""

NO_LIMIT: Final = 2**31 - 1
"""The last position of a model that has positions for any text."""


def size_class(rows: int) -> int:
    """Return the number of rows that a pass over so many is padded to."""
    last = SIZE_CLASSES[-1]
    return next((size for size in SIZE_CLASSES if size >= rows), -(-rows // last) * last)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The buffers of a pool on a GPU, and the CUDA graphs of passes over them; buffers never move.

    scratch   first slot of a page that belongs to no row: padding is written there
    capacity  tokens of any row, at most
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    scratch: int
    capacity: int
    recordings: CapturedGraphs = field(default_factory=CapturedGraphs)


@dataclass(slots=True)
class DevicePass:
    """The tokens of a pass, row after row, and where each row lies in the pool.

    places    [3, B]: each row's first slot, its tokens before the pass, and its tokens in the pass; others are padding
    scratch, capacity   as in `DevicePool`
    parents   for trees: a row's first token is the root, and parents[:, i] the parent of slot i (-1: the root)
    last_position       the model's last one: padding past it would read a position table out of bounds
    """

    tokens: Int[Tensor, "B T"]
    places: Int[Tensor, "3 B"]
    scratch: int
    capacity: int
    kinds: Sequence[tuple[str, int | None]]
    parents: Int[Tensor, "B K"] | None = None
    last_position: int = NO_LIMIT
    _layout: "Layout" = field(init=False)
    _ancestors: Int[Tensor, "B T"] | None = field(default=None, init=False)
    _positions: Int[Tensor, "B T"] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        from draftproof.kernels import attention, round_steps  # need Triton, which a CPU does without

        T = self.tokens.shape[1]
        self._layout = round_steps.lay_out(self.places, T, scratch=self.scratch, last_position=self.last_position)
        if self.parents is not None:
            above = lineage(self.parents)
            self._ancestors = attention.ancestor_bits(above)
            self._positions = self.places[1, :, None] + above.sum(2) - 1

    @property
    def positions(self) -> Int[Tensor, "1 N"]:
        """Return each token's position in its row; in a tree that is its depth."""
        if self._positions is not None:
            return self._positions.clamp(max=self.last_position).view(1, -1)
        return self._layout.positions.view(1, -1)

    @property
    def slots(self) -> Int[Tensor, " N"]:
        """Return where each token's keys and values are written."""
        return self._layout.slots

    @property
    def ends(self) -> Int[Tensor, " B"]:
        """Return the index of each row's last token in the pass."""
        return self._layout.ends

    def placeholders(self) -> dict[str, Tensor]:
        """Return a mask for each kind of layer that only names the kind, by its width; see `PackedPass`."""
        device = self.tokens.device
        return {
            kind: torch.empty((1, 1, 1, i + 1), dtype=torch.bool, device=device)  # nobody reads its values
            for i, (kind, _) in enumerate(self.kinds)
        }

    def attention(
        self,
        query: Float[Tensor, "1 h N d"],
        keys: Float[Tensor, "1 g S d"],
        values: Float[Tensor, "1 g S e"],
        mask: Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> Float[Tensor, "1 N h e"]:
        """Attend by the kernel: `keys` and `values` are a layer's whole pool."""
        from draftproof.kernels import attention  # needs Triton, which a CPU does without

        kind, size = self.kinds[0 if mask is None else mask.shape[-1] - 1]
        starts, lengths, widths = self.places
        attended = attention.decode_attention(
            query[0].transpose(0, 1).unflatten(0, self.tokens.shape),
            keys[0].transpose(0, 1),
            values[0].transpose(0, 1),
            starts,
            lengths,
            widths,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            capacity=self.capacity,
            window=size if kind != "chunked_attention" else None,
            chunk=size if kind == "chunked_attention" else None,
            softcap=extras.get("softcap"),
            sinks=extras.get("s_aux"),
            ancestors=self._ancestors,
            positions=self._positions,
        )
        return attended.flatten(0, 1)[None]
