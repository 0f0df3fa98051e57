"""What a head remembers: one buffer of keys and values, rows side by side, written at the positions it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.host import sent
from draftproof.models.graphs import Recordings

BUCKET = 256
"""Buffers grow by multiples of this many slots."""


@dataclass(slots=True)
class HeadCache:
    """Keys and values, a row's slots together. Who may look where is the caller's business: nothing is ever erased,
    a slot that is wrong by now is written again before it is looked at."""

    keys: Float[Tensor, "B S g d"]
    values: Float[Tensor, "B S g d"]
    recordings: Recordings = field(default_factory=Recordings)
    """Steps over these buffers that can be replayed."""

    @classmethod
    def empty(
        cls, rows: int, capacity: int, heads: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> "HeadCache":
        # zeros, not empty memory: what is masked still meets a weight of zero, and zero times NaN is NaN
        shape = (rows, rounded(capacity), heads, size)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def ensure(self, capacity: int) -> None:
        """Make room for this many slots in every row."""
        more = rounded(capacity) - self.capacity
        if more > 0:
            self.recordings.forget()
            self.keys, self.values = (
                torch.nn.functional.pad(part, (0, 0, 0, 0, 0, more)) for part in (self.keys, self.values)
            )

    def arranged(self, rows: Sequence[int | None]) -> "HeadCache":
        """A cache of these rows, in this order; None is a new one. Of a new row nothing is ever looked at that was not
        written, but it must be numbers."""
        device = self.keys.device
        old = sent([row for row in rows if row is not None], device)
        new = sent([b for b, row in enumerate(rows) if row is not None], device)
        shape = (len(rows), *self.keys.shape[1:])
        return HeadCache(
            self.keys.new_zeros(shape).index_copy_(0, new, self.keys[old]),
            self.values.new_zeros(shape).index_copy_(0, new, self.values[old]),
        )

    def row(self, b: int) -> "HeadCache":
        """One row, by reference."""
        return HeadCache(self.keys[b : b + 1], self.values[b : b + 1])

    def write(
        self,
        keys: Float[Tensor, "B g n d"],
        values: Float[Tensor, "B g n d"],
        slots: Int[Tensor, "B n"],
        reach: int,
    ) -> tuple[Float[Tensor, "B g S d"], Float[Tensor, "B g S d"]]:
        """Write at these slots; all that lies before `reach`."""
        starts = torch.arange(len(slots), device=slots.device)[:, None] * self.capacity
        flat = (slots + starts).flatten()
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.flatten(0, 1).index_copy_(0, flat, new.transpose(1, 2).flatten(0, 1).to(buffer.dtype))
        return self.keys[:, :reach].transpose(1, 2), self.values[:, :reach].transpose(1, 2)


def rounded(slots: int) -> int:
    """To whole buckets, at least one."""
    return max(1, -(-slots // BUCKET)) * BUCKET
