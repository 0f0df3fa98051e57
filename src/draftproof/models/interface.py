"""Define the interface of a language model: tokens and a cache in, logits out.

A pass writes after each row's length and changes no length. What it wrote counts only once `keep` lengthens the row,
so rolling back after a rejection means keeping fewer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Cache(Protocol):
    """A model's state for the tokens of each row, such as keys and values."""

    lengths: Int[Tensor, " B"]
    """Tokens cached in each row. Assigning smaller lengths truncates the rows."""

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass.

        Without `path` these are its first tokens. After a tree they are the root, then the slots that `path` names
        (PAD after the last).
        """

    def take(self, rows: Sequence[int]) -> "Cache":
        """Return a cache of these rows, in this order."""

    def join(self, other: "Cache") -> "Cache":
        """Return a cache of these rows followed by the rows of `other`."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of one pass. `hidden` holds the states after the requested layers, in the requested order."""

    logits: Float[Tensor, "B J V"]
    hidden: tuple[Float[Tensor, "B T H"], ...] = ()


@runtime_checkable
class Model(Protocol):
    """A language model that scores tokens over a cache."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int | None:
        """Return the number of positions the model supports; None if there is no limit."""

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
        """Score `tokens` as the continuation of each cached row.

        A row may be padded on the right with any valid token: a token that is not kept is never attended to later.
        `parents`: tokens[:, 0] is the root and tokens[:, 1 + i] is slot i of a tree, after its parent slot (-1: the
        root); a slot attends to its ancestors only. `scored`: number of last positions that get logits; all if None.
        `layers`: layers after which hidden states are returned (1 is the first layer; the last is after the norm).
        """
