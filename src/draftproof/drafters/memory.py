"""What a drafter remembers of each request: found by its id, forgotten when the request has left the batch."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from draftproof.drafters.interface import Context

T = TypeVar("T")


class Memory(Generic[T]):
    """One note a request. Nobody tells a drafter that a request is over, so who is not in the batch is taken to be:
    one that comes back is read anew, which costs time and nothing else."""

    def __init__(self) -> None:
        self._notes: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def forget(self, contexts: Sequence[Context]) -> list[T]:
        """Drop the notes on all requests but these, and hand them out a last time."""
        present = {context.id for context in contexts}
        return [self._notes.pop(gone) for gone in [name for name in self._notes if name not in present]]

    def of(self, context: Context, blank: Callable[[], T]) -> T:
        note = self._notes.get(context.id)
        if note is None:
            note = self._notes[context.id] = blank()
        return note


class Strangers:
    """Who may read what earlier requests left behind: those whose seed is new.

    A request with the seed of an earlier one throws the same coins. Guessing by a text that those coins have made
    would make the guess depend on the coins that judge it, which is a bias.
    """

    def __init__(self) -> None:
        self._seeds: set[int] = set()

    def admit(self, seed: int) -> bool:
        new = seed not in self._seeds
        self._seeds.add(seed)
        return new
