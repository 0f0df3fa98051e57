"""A KV pool: keys and values of all rows of a model, in buffers that are allocated once and never move.

A row owns one extent of slots. Entering, leaving, truncating and growing in place edit a table of integers. Only three
things copy: sharing a prefix, growing into a run elsewhere, and the kept path of a tree, which moves its own slots.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.models.extents import PAGE, Extent, Extents, pages_for


class LayerShape(NamedTuple):
    """The sizes of one layer's keys and values for one token."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class PoolFull(Exception):  # noqa: N818  # a signal to whoever schedules rows, not a fault
    """No free run of the pool is long enough: free some pages and try again."""


@dataclass(slots=True)
class PoolRow:
    """A row of the pool: where it lies, and how many tokens it holds."""

    extent: Extent
    length: int = 0


class SavedRow(NamedTuple):
    """A row that was copied out of the pool, with the pages it had."""

    length: int
    pages: int
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(slots=True)
class KVPool:
    """The buffers of every layer, `[slots, heads, size]`, and the rows that share them.

    `spare` pages after the others belong to no row.
    """

    shapes: Sequence[LayerShape]
    pages: int
    device: torch.device
    spare: int = 0
    rows: dict[int, PoolRow] = field(default_factory=dict)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    extents: Extents = field(init=False)

    def __post_init__(self) -> None:
        slots = (self.pages + self.spare) * PAGE
        # Uninitialised: no row attends beyond its length. An operating system gives memory to what is written only.
        self.keys = [self._buffer(slots, s.heads, s.key_size, s.dtype) for s in self.shapes]
        self.values = [self._buffer(slots, s.heads, s.value_size, s.dtype) for s in self.shapes]
        self.extents = Extents(self.pages)

    @property
    def tokens(self) -> int:
        """Return how many tokens rows can hold together."""
        return self.pages * PAGE

    def _buffer(self, slots: int, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((slots, heads, size), dtype=dtype, device=self.device)

    def enter(self, row: int, tokens: int) -> None:
        """Give a new row room for this many tokens; raise `PoolFull` if there is none."""
        if row in self.rows:
            raise ValueError(f"row {row} is in the pool already")
        extent = self.extents.take(pages_for(tokens))
        if extent is None:
            raise PoolFull(f"no run of {pages_for(tokens)} free pages among {self.extents.free_pages} of {self.pages}")
        self.rows[row] = PoolRow(extent)

    def leave(self, row: int) -> None:
        """Free a row's pages."""
        self.extents.give(self.rows.pop(row).extent)

    def ensure(self, row: int, tokens: int) -> None:
        """Make room for this many tokens in a row: in place, else by moving it; raise `PoolFull` if neither goes.

        It then has room for twice its tokens if that much is free, so that a growing text moves few times.
        """
        here = self.rows[row]
        if tokens <= here.extent.slots:
            return
        least = pages_for(tokens)
        for wanted in dict.fromkeys((2 * least, least)):
            longer = self.extents.extend(here.extent, wanted - here.extent.pages)
            if longer is None and (other := self.extents.take(wanted)) is not None:
                self._copy(here.extent, other, here.length)
                self.extents.give(here.extent)
                longer = other
            if longer is not None:
                here.extent = longer
                return
        raise PoolFull(f"row {row} needs {least} pages, and no run of them is free")

    def share(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` tokens of a row into another one, which holds none."""
        if self.rows[row].length or length > self.rows[source].length:
            raise ValueError(f"row {row} takes {length} tokens of row {source}, which holds {self.rows[source].length}")
        self._copy(self.rows[source].extent, self.rows[row].extent, length)
        self.rows[row].length = length

    def trim(self, row: int) -> None:
        """Free the pages after a row's tokens."""
        here = self.rows[row]
        spare = here.extent.pages - pages_for(here.length)
        if spare > 0:
            here.extent = Extent(here.extent.first, here.extent.pages - spare)
            self.extents.give(Extent(here.extent.end, spare))

    @torch.inference_mode()
    def move_path(self, row: int, kept: Sequence[int]) -> None:
        """Move the kept slots of a tree next to its root, the first token after the row's length."""
        here = self.rows[row]
        first = here.extent.start + here.length + 1
        if list(kept) == list(range(len(kept))):
            return
        source = torch.tensor([first + slot for slot in kept], device=self.device)
        for buffer in (*self.keys, *self.values):
            buffer[first : first + len(kept)] = buffer[source]

    @torch.inference_mode()
    def save(self, row: int) -> SavedRow:
        """Copy a row out of the pool, and free its pages."""
        here = self.rows[row]
        held = slice(here.extent.start, here.extent.start + here.length)
        saved = SavedRow(
            here.length, here.extent.pages, [k[held].clone() for k in self.keys], [v[held].clone() for v in self.values]
        )
        self.leave(row)
        return saved

    @torch.inference_mode()
    def restore(self, row: int, saved: SavedRow) -> None:
        """Copy a saved row back; raise `PoolFull` if there is no room for it."""
        self.enter(row, max(saved.length + 1, saved.pages * PAGE))
        here = self.rows[row]
        held = slice(here.extent.start, here.extent.start + saved.length)
        for buffers, copies in ((self.keys, saved.keys), (self.values, saved.values)):
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer[held] = copy
        here.length = saved.length

    @torch.inference_mode()
    def _copy(self, source: Extent, target: Extent, length: int) -> None:
        for buffer in (*self.keys, *self.values):
            buffer[target.start : target.start + length] = buffer[source.start : source.start + length]


MOST_TOKENS: int = 2**17
"""Tokens of a row in a model without a limit, for the size of its pool."""


def pages_within(
    memory: int | float, bytes_per_token: int, rows: int, max_length: int | None, device: torch.device | None = None
) -> int:
    """Return the pages of a pool within a budget: bytes, or a share of the free memory.

    A pool is not larger than twice what its rows can fill: the other half is for idle prefixes.
    """
    budget = memory if isinstance(memory, int) else int(memory * _free_memory(device))
    pages = budget // max(1, bytes_per_token * PAGE)
    if pages < 1:
        raise ValueError(
            f"kv_memory={memory!r} is {budget} bytes, which hold {budget // max(1, bytes_per_token)} tokens of "
            f"{bytes_per_token} bytes: a pool needs {PAGE} tokens at least, or {bytes_per_token * PAGE} bytes"
        )
    return min(pages, 2 * rows * pages_for(max_length or MOST_TOKENS))


def _free_memory(device: torch.device | None) -> int:
    """Return the bytes of memory that are free on a device, as far as the driver or the operating system tells."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
