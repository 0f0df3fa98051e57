"""The slot cache: one static K/V buffer for each layer, a length for each row; forgetting is a smaller length.

It knows slots, not tokens: who may look at which slot is the mask's business (masks.py).
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import proxy

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from draftproof.core.device import is_cpu, to_device
from draftproof.models.cuda_graphs import Recordings
from draftproof.models.interface import Cache


@runtime_checkable
class Slots(Protocol):
    """What a layer asks its cache: how many slots there are, where this pass writes, and how far it looks."""

    capacity: int
    reach: int
    slots: Int[Tensor, " N"]

    @property
    def bound(self) -> int: ...


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers dispatches on this class
    """One layer's keys and values, `[B, slots, heads, size]`: a row's tokens lie together, as `update` brings them."""

    # A window is cut by the mask. The buffer keeps everything, or a rollback could not bring back what slid out.
    is_sliding = False

    def __init__(self, cache: Slots) -> None:
        super().__init__()
        # Not a reference: the two would hold each other, and buffers and recordings stay until garbage is collected.
        self.cache: Slots = proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states: Tensor) -> Tensor:
        # Zeros, not empty memory: a masked slot still meets a weight of zero, and zero times NaN is NaN.
        B, heads, _, size = states.shape
        return states.new_zeros(B, self.cache.capacity, heads, size)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind each row's length, return all slots this pass may look at, `[B, heads, reach, size]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        buffer.flatten(0, 1).index_copy_(0, self.cache.slots, states.transpose(1, 2).flatten(0, 1))
        return buffer[:, : self.cache.reach].transpose(1, 2)

    def map(self, change: Any, *others: "SlotLayer") -> None:
        """Replace both buffers by what `change` makes of them (and of the other layers' buffers)."""
        if self.is_initialized:
            self.keys = change(self.keys, *(other.keys for other in others))
            self.values = change(self.values, *(other.values for other in others))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.reach, 0

    def get_seq_length(self) -> int:
        return self.cache.bound

    def get_max_length(self) -> int:
        return -1


Lengths = npt.NDArray[np.int64]

BUCKET = 256
"""Buffers grow by multiples of this many slots."""

CUDA_REACH = 256
"""On a GPU a pass looks at a multiple of this many slots, so that few different shapes occur, and few are recorded."""


class SlotCache:
    """What a transformers model remembers of each row."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = _rounded(max(capacity, 1), BUCKET)
        self.width = 0
        """Tokens of the last pass."""
        self.reach = 0
        """Slots that the last pass could look at."""
        self.slots = torch.empty(0, dtype=torch.long, device=device)
        """Where the last pass wrote, in buffers flattened over rows and slots."""
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._known: Lengths | None = np.zeros(rows, dtype=np.int64)
        """The lengths as the host knows them. None when it was not told: asking the device in every round would make it
        wait, so that `_ahead` then runs ahead of the truth and is corrected at bucket borders."""
        self._ahead = 0
        self.recordings = Recordings()
        """Passes over these buffers that can be replayed."""
        self.past = TransformersCache(layers=[SlotLayer(self) for _ in range(layers)])

    @property
    def layers(self) -> list[SlotLayer]:
        return self.past.layers  # type: ignore[no-any-return]

    @property
    def bound(self) -> int:
        """Never less than the longest row: how far a pass must look."""
        return self._ahead if self._known is None else int(self._known.max(initial=0))

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens remembered. Forgetting is assigning smaller lengths."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        if lengths.shape != self._lengths.shape:
            raise ValueError(f"lengths {tuple(lengths.shape)} given for {len(self._lengths)} rows")
        known = _on_host(lengths)
        if known is not None and known.max(initial=0) > self.bound + self.width:
            raise ValueError(f"lengths reach {known.max()}, but nothing was written behind {self.bound + self.width}")
        self._ahead, self._known = self.bound, known
        self._lengths = self._here(lengths)

    @property
    def plain(self) -> bool:
        """Does plain causal attention say it all in this pass? Either nothing is remembered yet, or one token of one
        row sees every slot."""
        exact = self.width == 1 and len(self._lengths) == 1 and is_cpu(self._lengths.device)
        return (self.bound == 0 and self.width > 1) or exact

    def open(self, width: int, limit: int | None = None) -> Int[Tensor, "B T"]:
        """Make room for `width` more tokens behind every row, and say at which slots they go. A row that already
        holds `limit` tokens is refused."""
        self.reserve(width, limit)
        return self.place(self._lengths)

    def reserve(self, width: int, limit: int | None = None) -> None:
        """Make room for `width` more tokens behind every row: what the host has to do for a pass."""
        if self._known is None and (self.bound + width > self.capacity or (limit is not None and self.bound >= limit)):
            self._known = self._lengths.cpu().numpy()
        if limit is not None and self.bound >= limit:
            raise ValueError(
                f"a row holds {self.bound} tokens, all of the model's {limit} positions: take it out first"
            )
        if self.bound + width > self.capacity:
            self._grow(self.bound + width)
        self.width, self.reach = width, self.bound + width
        if not is_cpu(self._lengths.device):
            self.reach = min(_rounded(self.reach, CUDA_REACH), self.capacity)

    def place(self, lengths: Int[Tensor, " B"]) -> Int[Tensor, "B T"]:
        """The slots behind these lengths, where the pass is to write: what the device has to do for it."""
        slots = lengths[:, None] + torch.arange(self.width, device=lengths.device)
        self.slots = self._flat(slots).flatten()
        return slots

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass: its first ones, or after a tree the first one
        (the root) and then the slots that `path` names (PAD after the last).

        Counts that lie on the host keep the host's knowledge of the lengths exact without asking the device.
        """
        known = _on_host(counts)
        if known is not None and len(known) and not 0 <= known.min() <= known.max() <= self.width:
            raise ValueError(f"counts {counts.tolist()} must lie within the last pass's {self.width} tokens")
        here = self._here(counts)
        if path is not None:
            self._gather(here, self._here(path))
        self._lengths = self._lengths + here
        self._ahead = self.bound + (self.width if known is None else int(known.max(initial=0)))
        self._known = None if known is None or self._known is None else self._known + known

    def take(self, rows: Sequence[int]) -> "SlotCache":
        """A cache of these rows, in this order."""
        index = to_device(list(rows), self._lengths.device)
        taken = self._like(len(rows), self.capacity)
        taken._lengths, taken._ahead = self._lengths[index], self.bound
        taken._known = None if self._known is None else self._known[list(rows)]
        for new, old in zip(taken.layers, self.layers, strict=True):
            if old.is_initialized:
                new.keys, new.values, new.is_initialized = old.keys[index], old.values[index], True
        return taken

    def join(self, other: Cache) -> "SlotCache":
        """These rows, then the other's."""
        if not isinstance(other, SlotCache):
            raise ValueError(f"other is a {type(other).__name__}, and a SlotCache joins only its like")
        capacity = max(self.capacity, other.capacity)
        joined = self._like(len(self._lengths) + len(other._lengths), capacity)
        joined._lengths = torch.cat([self._lengths, other._lengths])
        joined._ahead = max(self.bound, other.bound)
        known = [part for part in (self._known, other._known) if part is not None]
        joined._known = np.concatenate(known) if len(known) == 2 else None
        for new, mine, theirs in zip(joined.layers, self.layers, other.layers, strict=True):
            if mine.is_initialized or theirs.is_initialized:
                new.keys = _stacked(mine.keys, theirs.keys, joined, len(self._lengths))
                new.values = _stacked(mine.values, theirs.values, joined, len(self._lengths))
                new.is_initialized = True
        return joined

    def window(self, rows: slice, length: int) -> "SlotCache":
        """These rows, all of them `length` long, on the same memory: what is written there is written here."""
        view = self._like(len(self._lengths[rows]), self.capacity)
        view._lengths = self._lengths[rows]
        view._known = np.full(len(view._lengths), length, dtype=np.int64)
        for new, old in zip(view.layers, self.layers, strict=True):
            new.keys, new.values, new.is_initialized = old.keys[rows], old.values[rows], True
        return view

    def _like(self, rows: int, capacity: int) -> "SlotCache":
        return SlotCache(len(self.layers), rows, capacity, self._lengths.device)

    def _here(self, numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        # Sent without waiting: the stream reads them after they have arrived.
        return numbers.to(self._lengths.device, torch.long, non_blocking=True)

    def _flat(self, slots: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        return rows * self.capacity + slots

    @torch.inference_mode()
    def _gather(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"]) -> None:
        """Move the kept slots of a tree next to its root."""
        first = self._lengths[:, None] + 1
        order = torch.arange(path.shape[1], device=path.device)
        # What is not kept moves onto itself, so that shapes do not depend on how much was kept.
        kept = torch.where(order < counts[:, None] - 1, path, order)
        source, target = self._flat(first + kept).flatten(), self._flat(first + order).flatten()

        def move(buffer: Tensor) -> Tensor:
            flat = buffer.flatten(0, 1)
            flat.index_copy_(0, target, flat[source])
            return buffer

        for layer in self.layers:
            layer.map(move)

    @torch.inference_mode()
    def _grow(self, needed: int) -> None:
        # A quarter at least: long texts then copy their buffers few times.
        capacity = _rounded(max(needed, self.capacity * 5 // 4), BUCKET)
        for layer in self.layers:
            layer.map(lambda buffer: _padded(buffer, capacity))
        self.recordings.forget()
        self.capacity = capacity


def released(tensor: Tensor) -> Tensor:
    """What a pass returns, as an ordinary tensor. Buffers and passes live in inference mode, which saves a tenth of a
    pass on a CPU; callers outside of it could not write to such a tensor."""
    return tensor if torch.is_inference_mode_enabled() else tensor.clone()


def _on_host(numbers: Int[Tensor, " B"]) -> Lengths | None:
    """These numbers where the host can look at them; None where it would have to wait."""
    return numbers.numpy().astype(np.int64) if numbers.device.type == "cpu" else None


def _rounded(slots: int, to: int) -> int:
    return -(-slots // to) * to


def _padded(buffer: Tensor, capacity: int) -> Tensor:
    wider = buffer.new_zeros(buffer.shape[0], capacity, *buffer.shape[2:])
    wider[:, : buffer.shape[1]] = buffer
    return wider


def _stacked(mine: Tensor | None, theirs: Tensor | None, joined: SlotCache, first: int) -> Tensor:
    """Both buffers in one; a cache that has seen no pass yet has none, and its rows stay zero."""
    some = mine if mine is not None else theirs
    assert some is not None
    both = some.new_zeros(len(joined.lengths), joined.capacity, *some.shape[2:])
    if mine is not None:
        both[:first, : mine.shape[1]] = mine
    if theirs is not None:
        both[first:, : theirs.shape[1]] = theirs
    return both
