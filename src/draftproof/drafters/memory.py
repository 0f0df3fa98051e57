"""State that a drafter keeps per request, and the rule for reusing text between requests."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from draftproof.drafters.interface import Context

T = TypeVar("T")


class Memory(Generic[T]):
    """One entry per request, found by the request's id.

    A drafter is not told when a request ends, so the entry of a request that is missing from the batch is dropped. If
    the request comes back, its text is read again, which costs time and nothing else.
    """

    def __init__(self) -> None:
        self._entries: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, contexts: Sequence[Context]) -> list[T]:
        """Drop the entries of all requests but these, and return the dropped entries."""
        present = {context.id for context in contexts}
        return [self._entries.pop(gone) for gone in [name for name in self._entries if name not in present]]

    def of(self, context: Context, make: Callable[[], T]) -> T:
        """Return the request's entry, made with `make` if it has none."""
        entry = self._entries.get(context.id)
        if entry is None:
            entry = self._entries[context.id] = make()
        return entry


class NewSeeds:
    """The seeds met so far; only requests with a new seed may use the text of earlier requests.

    A request with the seed of an earlier one uses the same random numbers. If its draft were made from a text that
    those numbers produced, the draft would depend on the coins that accept or reject it, which is a bias.
    """

    def __init__(self) -> None:
        self._seeds: set[int] = set()

    def admit(self, seed: int) -> bool:
        """Record the seed; return True if it is new."""
        new = seed not in self._seeds
        self._seeds.add(seed)
        return new
