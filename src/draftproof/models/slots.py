"""One layer of the slot cache, as transformers wants it."""

from typing import Any, Protocol, runtime_checkable
from weakref import proxy

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


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
