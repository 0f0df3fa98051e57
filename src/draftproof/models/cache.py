"""The slot cache: one static K/V buffer for each layer and a length for each row.

Truncating a row only lowers its length, so rolling back after a rejection copies nothing. The cache manages slots, not
attention: masks.py decides which token may attend to which slot.
"""

from collections.abc import Callable, Sequence
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
from draftproof.models.cuda_graphs import CapturedGraphs
from draftproof.models.interface import Cache
from draftproof.models.pool import LayerShape

HostLengths = npt.NDArray[np.int64]

BUCKET = 256
"""Slots: buffers grow by multiples of this."""

CUDA_REACH = 256
"""Slots: on a GPU a pass attends to a multiple of this, so that few shapes occur and few CUDA graphs are captured."""


class SlotCache:
    """The keys and values of a transformers model, with a length for each row."""

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = _rounded(max(capacity, 1), BUCKET)
        self.width = 0
        """Tokens in each row of the last pass."""
        self.reach = 0
        """Slots that the last pass could attend to."""
        self.slots = torch.empty(0, dtype=torch.long, device=device)
        """Slots written by the last pass, in buffers flattened over rows and slots."""
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._host_lengths: HostLengths | None = np.zeros(rows, dtype=np.int64)
        """The lengths on the host; None if only the device has them. Reading them back in every round would
        synchronise, so `_upper_bound` overestimates them until a bucket border, where they are read."""
        self._upper_bound = 0
        self.recordings = CapturedGraphs()
        """CUDA graphs of passes over these buffers."""
        self.past = TransformersCache(layers=[SlotLayer(self) for _ in range(layers)])

    @property
    def layers(self) -> list["SlotLayer"]:
        return self.past.layers  # type: ignore[no-any-return]

    @property
    def bound(self) -> int:
        """Return an upper bound on the longest row: a pass must attend at least that far."""
        return self._upper_bound if self._host_lengths is None else int(self._host_lengths.max(initial=0))

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of tokens cached in each row. Assigning smaller lengths truncates the rows."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        if lengths.shape != self._lengths.shape:
            raise ValueError(f"lengths {tuple(lengths.shape)} given for {len(self._lengths)} rows")
        on_host = _if_on_host(lengths)
        if on_host is not None and on_host.max(initial=0) > self.bound + self.width:
            raise ValueError(f"lengths reach {on_host.max()}, but nothing was written after {self.bound + self.width}")
        self._upper_bound, self._host_lengths = self.bound, on_host
        self._lengths = self._to_own_device(lengths)

    def read_lengths(self) -> list[int]:
        """Return the lengths on the host: without a sync, unless `counts` or lengths were given on a GPU."""
        lengths: list[int] = (self._lengths if self._host_lengths is None else self._host_lengths).tolist()
        return lengths

    @property
    def is_plain_causal(self) -> bool:
        """Return whether this pass needs no mask.

        Either the cache is empty, or there is one row with one token, which attends to every slot.
        """
        exact = self.width == 1 and len(self._lengths) == 1 and is_cpu(self._lengths.device)
        return (self.bound == 0 and self.width > 1) or exact

    def open(self, width: int, limit: int | None = None) -> Int[Tensor, "B T"]:
        """Reserve `width` slots after every row and return them; refuse a row that already holds `limit` tokens."""
        self.reserve(width, limit)
        return self.place(self._lengths)

    def reserve(self, width: int, limit: int | None = None) -> None:
        """Reserve `width` slots after every row: the host's part of preparing a pass."""
        is_full = self.bound + width > self.capacity or (limit is not None and self.bound >= limit)
        if self._host_lengths is None and is_full:
            self._host_lengths = self._lengths.cpu().numpy()
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
        """Return the slots after these lengths, where the pass writes: the device's part of preparing it."""
        slots = lengths[:, None] + torch.arange(self.width, device=lengths.device)
        self.slots = self._flat(slots).flatten()
        return slots

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass.

        Without `path` these are its first tokens. After a tree they are the root, then the slots that `path` names
        (PAD after the last). Counts on the host keep the host's copy of the lengths exact without a sync.
        """
        on_host = _if_on_host(counts)
        if on_host is not None and len(on_host) and not 0 <= on_host.min() <= on_host.max() <= self.width:
            raise ValueError(f"counts {counts.tolist()} must lie within the last pass's {self.width} tokens")
        counts = self._to_own_device(counts)
        if path is not None:
            self._move_path(counts, self._to_own_device(path))
        self._lengths = self._lengths + counts
        self._upper_bound = self.bound + (self.width if on_host is None else int(on_host.max(initial=0)))
        self._host_lengths = None if on_host is None or self._host_lengths is None else self._host_lengths + on_host

    def take(self, rows: Sequence[int]) -> "SlotCache":
        """Return a cache of these rows, in this order."""
        index = to_device(list(rows), self._lengths.device)
        taken = self._like(len(rows), self.capacity)
        taken._lengths, taken._upper_bound = self._lengths[index], self.bound
        taken._host_lengths = None if self._host_lengths is None else self._host_lengths[list(rows)]
        for new, old in zip(taken.layers, self.layers, strict=True):
            if old.is_initialized:
                new.keys, new.values, new.is_initialized = old.keys[index], old.values[index], True
        return taken

    def join(self, other: Cache) -> "SlotCache":
        """Return a cache of these rows followed by the rows of `other`."""
        if not isinstance(other, SlotCache):
            raise ValueError(f"other is a {type(other).__name__}: a SlotCache can be joined only with a SlotCache")
        capacity = max(self.capacity, other.capacity)
        joined = self._like(len(self._lengths) + len(other._lengths), capacity)
        joined._lengths = torch.cat([self._lengths, other._lengths])
        joined._upper_bound = max(self.bound, other.bound)
        known = [lengths for lengths in (self._host_lengths, other._host_lengths) if lengths is not None]
        joined._host_lengths = np.concatenate(known) if len(known) == 2 else None
        for new, first, second in zip(joined.layers, self.layers, other.layers, strict=True):
            if first.is_initialized or second.is_initialized:
                new.keys = _stacked(first.keys, second.keys, joined, len(self._lengths))
                new.values = _stacked(first.values, second.values, joined, len(self._lengths))
                new.is_initialized = True
        return joined

    def flat_buffers(self, shapes: Sequence[LayerShape]) -> tuple[list[Tensor], list[Tensor]]:
        """Return all layers' keys and values, `[rows · capacity, heads, size]`; made on the first call."""
        rows = len(self._lengths)
        for layer, shape in zip(self.layers, shapes, strict=True):
            if not layer.is_initialized:
                sizes = shape.key_size, shape.value_size
                layer.keys, layer.values = (
                    torch.zeros((rows, self.capacity, shape.heads, size), dtype=shape.dtype) for size in sizes
                )
                layer.is_initialized = True
        return [layer.keys.flatten(0, 1) for layer in self.layers], [
            layer.values.flatten(0, 1) for layer in self.layers
        ]

    def rows_view(self, rows: slice, length: int) -> "SlotCache":
        """Return a cache of these rows, all `length` long, that shares this cache's buffers."""
        view = self._like(len(self._lengths[rows]), self.capacity)
        view._lengths = self._lengths[rows]
        view._host_lengths = np.full(len(view._lengths), length, dtype=np.int64)
        for new, old in zip(view.layers, self.layers, strict=True):
            new.keys, new.values, new.is_initialized = old.keys[rows], old.values[rows], True
        return view

    def _like(self, rows: int, capacity: int) -> "SlotCache":
        return SlotCache(len(self.layers), rows, capacity, self._lengths.device)

    def _to_own_device(self, numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        # Non-blocking: the stream orders the copy before every kernel that reads it.
        return numbers.to(self._lengths.device, torch.long, non_blocking=True)

    def _flat(self, slots: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        return rows * self.capacity + slots

    @torch.inference_mode()
    def _move_path(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"]) -> None:
        """Move the kept slots of a tree next to its root."""
        first = self._lengths[:, None] + 1
        order = torch.arange(path.shape[1], device=path.device)
        # A slot that is not kept moves onto itself, so that shapes do not depend on the counts.
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
        # By a quarter at least, so that the buffers of a long text are copied few times.
        capacity = _rounded(max(needed, self.capacity * 5 // 4), BUCKET)
        for layer in self.layers:
            layer.map(lambda buffer: _padded(buffer, capacity))
        self.recordings.forget()
        self.capacity = capacity


@runtime_checkable
class Slots(Protocol):
    """The part of a slot cache that its layers read: its capacity, where this pass writes, and how far it attends."""

    capacity: int
    reach: int
    slots: Int[Tensor, " N"]

    @property
    def bound(self) -> int: ...


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers dispatches on this class
    """One layer's keys and values, `[B, slots, heads, size]`: the order in which `update` receives tokens."""

    # The mask applies a sliding window. The buffer keeps every token, as a rollback may bring it into the window again.
    is_sliding = False

    def __init__(self, cache: Slots) -> None:
        super().__init__()
        # A weak reference: a cycle would keep buffers and CUDA graphs alive until the next garbage collection.
        self.cache: Slots = proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._zeros(key_states), self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: Tensor) -> Tensor:
        # Not uninitialised memory: a masked slot has weight zero, and zero times NaN is NaN.
        B, heads, _, size = states.shape
        return states.new_zeros(B, self.cache.capacity, heads, size)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write after each row's length, and return all slots this pass may attend to, `[B, heads, reach, size]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        buffer.flatten(0, 1).index_copy_(0, self.cache.slots, states.transpose(1, 2).flatten(0, 1))
        return buffer[:, : self.cache.reach].transpose(1, 2)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace both buffers by the result of `change`."""
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.reach, 0

    def get_seq_length(self) -> int:
        return self.cache.bound

    def get_max_length(self) -> int:
        return -1


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """Return the result of a pass as an ordinary tensor, which the caller may write to.

    Passes run in inference mode, which saves a tenth of a pass on a CPU. A caller in inference mode needs no copy.
    """
    return tensor if torch.is_inference_mode_enabled() else tensor.clone()


def _if_on_host(numbers: Int[Tensor, " B"]) -> HostLengths | None:
    """Return the numbers of a CPU tensor; None for a GPU tensor, as reading it would synchronise."""
    return numbers.numpy().astype(np.int64) if numbers.device.type == "cpu" else None


def _rounded(slots: int, to: int) -> int:
    return -(-slots // to) * to


def _padded(buffer: Tensor, capacity: int) -> Tensor:
    wider = buffer.new_zeros(buffer.shape[0], capacity, *buffer.shape[2:])
    wider[:, : buffer.shape[1]] = buffer
    return wider


def _stacked(first: Tensor | None, second: Tensor | None, joined: SlotCache, rows: int) -> Tensor:
    """Stack two buffers, the first of `rows` rows. A cache without a pass has none: its rows are zero."""
    some = first if first is not None else second
    assert some is not None
    both = some.new_zeros(len(joined.lengths), joined.capacity, *some.shape[2:])
    if first is not None:
        both[:rows, : first.shape[1]] = first
    if second is not None:
        both[rows:, : second.shape[1]] = second
    return both
