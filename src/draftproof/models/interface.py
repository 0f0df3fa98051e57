"""What a language model is to us: tokens and a cache in, logits out.

A cache holds, for each row, what the model remembers. A pass writes behind a row's length and changes no length:
what it wrote counts only once `keep` says so. Going back after a rejection is therefore keeping fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Cache(Protocol):
    """What a model remembers of each row."""

    lengths: Int[Tensor, " B"]
    """Tokens remembered. Forgetting is assigning smaller lengths."""

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass: its first ones, or after a tree the first one
        (the root) and then the slots that `path` names (PAD after the last)."""

    def take(self, rows: Sequence[int]) -> "Cache":
        """A cache of these rows, in this order."""

    def join(self, other: "Cache") -> "Cache":
        """These rows, then the other's."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What one pass showed. `hidden` holds the states after the layers that were asked for, in that order."""

    logits: Float[Tensor, "B J V"]
    hidden: tuple[Float[Tensor, "B T H"], ...] = ()


@runtime_checkable
class Model(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int | None:
        """Positions the model was made for; None where there is no limit."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, rows: int, capacity: int = 0) -> Cache: ...

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` behind what the cache remembers.

        A row may be padded on the right with anything valid: what is not kept is never seen again.
        `parents`: tokens[:, 0] is the root and tokens[:, 1 + i] is slot i of a tree, after its parent slot (-1: the
        root); a slot sees its ancestors only. `scored`: how many of the last positions get logits; all if None.
        `layers`: after which layers hidden states are wanted (1 is the first layer; the last is after the norm).
        """
