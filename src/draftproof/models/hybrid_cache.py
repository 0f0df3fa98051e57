"""The keys, values and recurrent states of a hybrid model's rows, and the rollback of tokens that were not kept."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from draftproof.core.device import to_device
from draftproof.models.cache import SlotCache, SlotLayer
from draftproof.models.interface import Cache
from draftproof.models.pooled_slots import PooledLayer, PooledSlots
from draftproof.models.recurrent import Call, Mixer, StateLayer, States, from_scans, in_parts, same_states
from draftproof.models.scans import Kept

NO_TREES: Final = (
    "a recurrent layer reads its tokens in one order, so a tree cannot be scored: use a rule for chains "
    '("block", "token" or "coupled") and branches=1'
)

STACKED: Final = 2**28
"""Bytes of states that a rollback computes at once: it stacks layers up to this size, to launch fewer operations."""


class SlotStateLayer(SlotLayer, StateLayer):
    """Keys and values beside recurrent states, for layers that have attention and a mixer side by side."""

    def __init__(self, cache: SlotCache, states: States) -> None:
        SlotLayer.__init__(self, cache)
        StateLayer.__init__(self, states)


class PooledStateLayer(PooledLayer, StateLayer):
    """Keys and values in a pool beside recurrent states, for layers that have attention and a mixer side by side."""

    def __init__(self, keys: Tensor, values: Tensor, states: States) -> None:
        PooledLayer.__init__(self, keys, values)
        StateLayer.__init__(self, states)


class HybridCache:
    """The keys, values and recurrent states of a model's rows.

    Tokens that were not kept are undone before the next pass, or before rows are taken or joined: until then `keep` may
    be called for some rows after others.
    """

    def __init__(
        self,
        kinds: Sequence[Any],
        mixers: Sequence[Mixer],
        slots: SlotCache | PooledSlots,
        states: Mapping[int, States],
    ) -> None:
        self.slots = slots
        self._kinds, self._mixers = kinds, mixers
        self._before: dict[int, States] | None = None
        """The states before the last pass, by layer; None if nothing is to be undone."""
        self._calls: dict[int, Call] = {}
        self._copies: dict[int, States] = {}
        self._start: list[int] = []
        self.layers: dict[int, StateLayer] = {}
        """The layers with recurrent states."""
        self.past = TransformersCache(layers=self._make_layers(states))

    def _make_layers(self, states: Mapping[int, States]) -> list[Any]:
        """Return a layer for each of the model's; those with keys and values are those of the slots."""
        layers: list[Any] = []
        attending = 0
        for index, kind in enumerate(self._kinds):
            attends = isinstance(kind, CacheLayerMixin)
            if index not in states:
                layers.append(self.slots.layers[attending] if attends else LinearAttentionLayer())
            elif attends:
                layers.append(_beside(self.slots, attending, states[index]))
            else:
                layers.append(StateLayer(states[index]))
            attending += attends
        self.layers = {index: layers[index] for index in states}
        return layers

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of tokens in each row. Assigning shortens rows by tokens of the last pass at most."""
        return self.slots.lengths

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        least = self.slots.read_lengths() if self._before is None else self._start
        for row, (wanted, start) in enumerate(zip(lengths.tolist(), least, strict=True)):
            if wanted < start:
                raise ValueError(
                    f"lengths[{row}]={wanted}: the recurrent states of this row hold {start} tokens, and only tokens "
                    "of the last pass can be taken back. Take the row out, and read its text again"
                )
        self.slots.lengths = lengths

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass, its first ones."""
        if path is not None:
            raise ValueError(NO_TREES)
        self.slots.keep(counts)

    def take(self, rows: Sequence[int]) -> "HybridCache":
        """Return a cache of these rows, in this order."""
        self.settle()
        index = to_device(list(rows), self.slots.lengths.device)
        states = {i: {key: state[index] for key, state in layer.states.items()} for i, layer in self.layers.items()}
        return HybridCache(self._kinds, self._mixers, self.slots.take(rows), states)

    def with_slots(self, slots: PooledSlots) -> "HybridCache":
        """Return the same states beside other keys and values."""
        self.settle()
        states = {index: layer.states for index, layer in self.layers.items()}
        return HybridCache(self._kinds, self._mixers, slots, states)

    def join(self, other: Cache) -> "HybridCache":
        """Return a cache of these rows followed by the rows of `other`."""
        if not isinstance(other, HybridCache):
            raise ValueError(f"other is a {type(other).__name__}: a HybridCache can be joined only with a HybridCache")
        self.settle()
        other.settle()
        states = {
            i: {key: torch.cat([state, other.layers[i].states[key]]) for key, state in layer.states.items()}
            for i, layer in self.layers.items()
        }
        slots: Any = self.slots  # of the same kind as the other's, or it refuses to join
        return HybridCache(self._kinds, self._mixers, slots.join(other.slots), states)

    def start_pass(self, width: int, limit: int | None) -> dict[int, Call]:
        """Undo what was not kept, make room for `width` tokens in every row, and return where calls are recorded."""
        self.settle()
        self.slots.reserve(width, limit)
        self._start = self.slots.read_lengths()
        self._before = {index: layer.states for index, layer in self.layers.items()}
        self._calls = {}
        if width == 1:
            for mixer in self._mixers:
                if mixer.steps_in_place:
                    layer = self.layers[mixer.layer]
                    layer.states = self._copies[mixer.layer] = {k: state.clone() for k, state in layer.states.items()}
        return self._calls

    def finish_pass(self) -> None:
        """Note which mixers have replaced the states of a pass over one token: theirs need no copy from now on."""
        for mixer in self._mixers:
            copies = self._copies.pop(mixer.layer, None)
            if copies is not None:
                now = self.layers[mixer.layer].states
                mixer.steps_in_place = any(now[key] is copy for key, copy in copies.items())

    @torch.inference_mode()
    def settle(self) -> None:
        """Undo the tokens of the last pass that were not kept: put states back, and compute those after the others."""
        before, self._before = self._before, None
        calls, self._calls = self._calls, {}
        if before is None:
            return
        T = self.slots.width
        lengths = zip(self.slots.read_lengths(), self._start, strict=True)
        counts = {row: length - start for row, (length, start) in enumerate(lengths) if length - start < T}
        if counts:
            self._shorten(before, calls, counts)
        for layer in self.layers.values():
            layer.conv_inputs.clear()

    def _shorten(self, before: dict[int, States], calls: dict[int, Call], counts: dict[int, int]) -> None:
        """Put the states of some rows back to what they were after so many tokens of the last pass, by row."""
        kept = Kept.of(counts, len(self._start), self.slots.lengths.device)
        if kept.most == 0:
            for index, states in before.items():
                self.layers[index].put(kept.rows, {key: kept.rows_of(state) for key, state in states.items()})
            return
        from_scan = [mixer for mixer in self._mixers if not mixer.replayed]
        for part in in_parts(from_scan, len(counts), STACKED):
            for index, states in from_scans(part, calls, before, self.layers, kept).items():
                self.layers[index].put(kept.rows, states)
        for mixer in self._mixers:
            if mixer.replayed:
                self._replay(mixer, before[mixer.layer], calls[mixer.layer], counts)

    def _replay(self, mixer: Mixer, before: States, call: Call, counts: dict[int, int]) -> None:
        """Put a mixer's states back, and replay it: rows that keep equal numbers of tokens together."""
        shape = len(self._start), self.slots.width
        by_count: dict[int, list[int]] = {}
        for row, n in counts.items():
            by_count.setdefault(n, []).append(row)
        for n, rows in by_count.items():
            index = None if len(rows) == shape[0] else to_device(rows, self.slots.lengths.device)
            old = before if index is None else {key: state[index] for key, state in before.items()}
            new = old if n == 0 else mixer.replay(call, old, shape, index, n)
            self.layers[mixer.layer].put(index, new)

    @torch.inference_mode()
    def agreeing(self, counts: dict[int, int]) -> set[int]:
        """Undo tokens of the last pass in every row, in both ways; return the layers whose states are then the same.

        counts  tokens to keep, by row: fewer than the pass had
        """
        assert self._before is not None
        found: list[dict[int, States]] = []
        for replayed in (True, False):
            for mixer in self._mixers:
                mixer.replayed = replayed
            try:
                self._shorten(self._before, self._calls, counts)
            except Exception:
                if replayed:
                    raise
                return set()  # what is recognised as a scan by its parameters' names may read anything
            found.append(
                {i: {k: state.clone() for k, state in layer.states.items()} for i, layer in self.layers.items()}
            )
        return {index for index in self.layers if same_states(found[1][index], found[0][index])}


def _beside(slots: SlotCache | PooledSlots, index: int, states: States) -> StateLayer:
    """Return a layer with recurrent states beside the keys and values of a layer of the slots, in its place."""
    old = slots.layers[index]
    if isinstance(slots, PooledSlots):
        pooled = slots.layers[index] = PooledStateLayer(old.keys, old.values, states)
        return pooled
    both = slots.layers[index] = SlotStateLayer(slots, states)
    both.keys, both.values, both.is_initialized = old.keys, old.values, old.is_initialized
    return both


def settled_states(cache: Cache) -> list[Tensor]:
    """Return the recurrent states of a cache after the tokens that were kept."""
    assert isinstance(cache, HybridCache)
    cache.settle()
    return [state for _, layer in sorted(cache.layers.items()) for state in layer.states.values()]
