"""What a round was, as plain numbers: nothing here knows tensors."""

from dataclasses import dataclass
from typing import Literal

Fate = Literal["kept", "rejected", "dropped"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that matters at a position: under p, under q, and in the residual max(0, w·p − q)."""

    token: int
    p: float
    q: float
    residual: float


@dataclass(frozen=True, slots=True)
class Slot:
    """A drafted token and what became of it.

    ratio   p/q
    chance  what the coin was held against; by token min(1, p/q), by block the chance of keeping the draft up to here
    judged  whether the rule came to look at this coin
    drawn   whether the token was drawn from q; otherwise it was chosen, and q is 1 on it
    """

    token: int
    p: float
    q: float
    ratio: float
    chance: float
    coin: float
    judged: bool
    kept: bool
    drawn: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Closing:
    """The token that ends the round: from the residual after a rejection, from p after none.

    `weight` is the w of the residual max(0, w·p − q), 1 unless a block was judged; `chance` is the token's probability
    under the distribution it was drawn from.
    """

    token: int
    p: float
    after_rejection: bool
    weight: float
    candidates: tuple[Candidate, ...]
    chance: float


@dataclass(frozen=True, slots=True)
class Round:
    slots: tuple[Slot, ...]
    kept: int
    closing: Closing
    as_block: bool

    @property
    def tokens(self) -> list[int]:
        """What the round emitted."""
        return [slot.token for slot in self.slots[: self.kept]] + [self.closing.token]

    def fate(self, i: int) -> Fate:
        """Of slot i. By token, what stands behind a rejected token is dropped without a look at it."""
        if i < self.kept:
            return "kept"
        return "rejected" if i == self.kept or self.as_block else "dropped"
