"""Allocate extents: runs of consecutive pages of a pool, as a table of integers.

A row of a KV pool owns one extent, so that its keys and values are one view of the pool's buffers. Best fit: an extent
comes from the smallest free run that holds it, which keeps long runs whole.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

PAGE: Final = 64
"""Slots in a page, and tokens in a chunk of a prompt: a prefix is shared page by page, and chunks are what is read."""


def pages_for(tokens: int) -> int:
    """Return the number of pages that hold this many tokens, at least one."""
    return max(1, -(-tokens // PAGE))


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of pages."""

    first: int
    pages: int

    @property
    def start(self) -> int:
        """Return its first slot."""
        return self.first * PAGE

    @property
    def slots(self) -> int:
        return self.pages * PAGE

    @property
    def end(self) -> int:
        """Return the page after its last."""
        return self.first + self.pages


class Extents:
    """The free pages of a pool, as runs in rising order."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free: list[Extent] = [Extent(0, pages)] if pages else []

    @property
    def free(self) -> list[Extent]:
        """Return the free runs in rising order; no two of them touch."""
        return list(self._free)

    @property
    def free_pages(self) -> int:
        return sum(run.pages for run in self._free)

    def take(self, pages: int) -> Extent | None:
        """Allocate an extent; None if no free run is long enough."""
        fitting = [run for run in self._free if run.pages >= pages]
        if not fitting:
            return None
        run = min(fitting, key=lambda each: each.pages)
        self._shorten(run, pages)
        return Extent(run.first, pages)

    def extend(self, extent: Extent, pages: int) -> Extent | None:
        """Lengthen an extent in place by this many pages; None if those after it are not free."""
        run = next((run for run in self._free if run.first == extent.end), None)
        if run is None or run.pages < pages:
            return None
        self._shorten(run, pages)
        return Extent(extent.first, extent.pages + pages)

    def give(self, extent: Extent) -> None:
        """Free an extent, and join it with the free runs beside it."""
        at = bisect_left(self._free, extent.first, key=lambda run: run.first)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before is not None and before.end > extent.first) or (after is not None and after.first < extent.end):
            raise ValueError(f"pages {extent.first} to {extent.end - 1} are freed, but some of them are free already")
        low, high = at, at
        first, end = extent.first, extent.end
        if before is not None and before.end == extent.first:
            low, first = at - 1, before.first
        if after is not None and after.first == extent.end:
            high, end = at + 1, after.end
        self._free[low:high] = [Extent(first, end - first)]

    def _shorten(self, run: Extent, pages: int) -> None:
        at = self._free.index(run)
        rest = Extent(run.first + pages, run.pages - pages)
        self._free[at : at + 1] = [rest] if rest.pages else []
