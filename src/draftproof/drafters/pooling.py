"""Tell a drafter what happens to rows: the methods that a drafter with a cache of its own may have.

A drafter without them loses nothing but time: its memory of a request is dropped when the request is not among the
contexts of a proposal, and rebuilt from the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from draftproof.drafters.interface import Context, Drafter, features_of


@runtime_checkable
class CachingDrafter(Protocol):
    """A drafter that holds keys and values in a pool of its own."""

    def kv_bytes(self) -> int:
        """Return the bytes that a token takes in its pool."""

    def open_pool(self, pages: int) -> None:
        """Allocate a pool of so many pages. From then on rows stay until `forget`."""

    def follow(self, context: Context, length: int) -> bool:
        """Read the first `length` tokens of a prompt, which the target has just read, so that no draft waits for it.

        Return whether the target's states in the context were taken; if not, they are kept for the first proposal.
        """

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        """Take over the first `length` tokens of another request's row; return False if it does not hold them."""

    def suspend(self, request: int) -> None:
        """Free the pool of a request's row, and keep its state until the request is back."""

    def rest(self, request: int) -> None:
        """Free the room after the text of a request that has ended; its row stays as an idle prefix until `forget`."""

    def forget(self, requests: Sequence[int]) -> None:
        """Drop what is known of requests that do not come back."""


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter's state of its rows, for any drafter: one without a pool is told nothing."""

    drafter: Drafter

    def _tell(self, method: str, *args: Any) -> Any:
        if isinstance(self.drafter, CachingDrafter):
            return getattr(self.drafter, method)(*args)
        return None

    def follow(self, context: Context, length: int) -> bool:
        """Return whether the drafter has taken the target's states at the tokens that were read."""
        return bool(self._tell("follow", context, length))

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        """Return whether a prefix may be shared: a drafter that reads the target's states must hold it, too."""
        if isinstance(self.drafter, CachingDrafter):
            return self.drafter.adopt(context, holder, length)
        return not features_of(self.drafter).layers

    def suspend(self, request: int) -> None:
        self._tell("suspend", request)

    def rest(self, request: int) -> None:
        self._tell("rest", request)

    def forget(self, requests: Sequence[int]) -> None:
        self._tell("forget", requests)
