"""One request's progress in a head's cache: what was read of the target's hidden states, and what waits to be."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from jaxtyping import Float
from torch import Tensor

from draftproof.drafters.interface import Context

MAX_BATCHED: Final = 16
"""Positions up to which rows are read in one batch; a longer row is read alone, because the others would be padding."""

POSITIONS_PER_PASS: Final = 512
"""Positions of one row read in a pass; the attention mask of a whole prompt could be larger than the head."""


class PromptChunk(NamedTuple):
    """The target's states at consecutive tokens of a prompt, from position `start` on, and the token after each."""

    start: int
    followers: list[int]
    states: list[tuple[Tensor, ...]]


@dataclass(slots=True)
class HeadRow:
    """One request's progress: `read` entries of the cache are valid, `waiting` holds the states to be read next.

    Before those come the `chunks` of a prompt, which are read when the row first drafts: many rows never do.
    """

    read: int = 0
    chunks: list["PromptChunk"] = field(default_factory=list)
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    known: int = 0
    """Positions whose states are read or waiting."""
    last: Float[Tensor, "1 H"] | None = None
    """The fused state of the last entry, so that a second proposal without new states gives the same draft."""

    def receive(self, context: Context) -> None:
        """Store the hidden states that are new in the context's target outputs.

        Positions that were skipped get states of zeros; the head then guesses worse, and nothing else changes.
        """
        outputs = context.target_outputs
        if outputs is None or not outputs.hidden:
            return
        self.add(outputs.hidden, outputs.stop - len(outputs.hidden[0]), min(outputs.stop, len(context.tokens) - 1))

    def add(self, hidden: tuple[Tensor, ...], first: int, stop: int) -> None:
        """Store those of the hidden states at positions from `first` on that are new, up to `stop`."""
        if stop <= self.known:
            return
        if first > self.known:
            self.waiting.append(tuple(states.new_zeros(first - self.known, states.shape[1]) for states in hidden))
        self.waiting.append(tuple(states[max(0, self.known - first) : stop - first] for states in hidden))
        self.known = stop
