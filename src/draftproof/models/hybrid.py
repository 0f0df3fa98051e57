"""Serve models with recurrent layers, alone or beside attention: Qwen3.5, LFM2, Falcon-H1, Mamba-2 and others.

Attention layers keep their tokens in a KV pool (pooled_slots.py), or in a slot cache where `pool_refusal` says why.
Recurrent layers are rolled back (recurrent.py); every row has states of its own, copied when rows come and go. Padding
is never kept, so it leaves no trace in a state; prompts are read in runs of equal length, where nothing is rolled back.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from draftproof.core.device import is_cpu, to_device
from draftproof.models.attention import ATTENTION_NAME, register, steady_attention
from draftproof.models.cache import SlotCache, SlotLayer, outside_inference_mode
from draftproof.models.compatibility import (
    decoder_config,
    head_size,
    is_quantized,
    max_positions,
    refuse_unsupported,
)
from draftproof.models.hf import LayerStates
from draftproof.models.interface import Cache, Forward
from draftproof.models.masks import additive_mask, chain_view
from draftproof.models.packed import attending, check_layers, check_pass
from draftproof.models.pool import KVPool, LayerShape, SavedRow
from draftproof.models.pooled_slots import OneTokenPass, PooledLayer, PooledSlots, written_shape
from draftproof.models.probe import attempt, probe_causality, probe_recurrence
from draftproof.models.recurrent import (
    Call,
    Mixer,
    StateLayer,
    States,
    find_mixers,
    from_scans,
    in_parts,
    recording,
    same_states,
)
from draftproof.models.rows import Read, Reading, RectangularRows
from draftproof.models.scans import Kept
from draftproof.models.weight_sharing import copy_for_slot_cache, run_once

NO_TREES: Final = (
    "a recurrent layer reads its tokens in one order, so a tree cannot be scored: use a rule for chains "
    '("block", "token" or "coupled") and branches=1'
)

PIECE: Final = 256
"""Tokens of a prompt in one pass: what is recorded for a replay takes memory for each of them."""

STACKED: Final = 2**28
"""Bytes of states that a rollback computes at once: it stacks layers up to this size, to launch fewer operations."""

ROLLBACKS: Final = ({0: 2, 1: 4, 2: 0}, {0: 3, 1: 3, 2: 3})
"""Tokens that rows keep of a pass over five, by row, where both ways to roll back are compared.

Not one: a replay of one token takes a step, which in half precision some mixers round more coarsely than a scan."""


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


class HybridModel:
    """A causal language model of transformers with recurrent layers as a `Model`. It scores chains, not trees.

    The object passed in is never altered, as in `HFModel`. Every model is probed first: one whose passes over several
    tokens ignore their state (Mamba-1, Jamba and FalconMamba in transformers 5.22) is refused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_unsupported(model, recurrent=True)
        if is_quantized(model):
            run_once(model)
        self._net = copy_for_slot_cache(model)
        self._config = decoder_config(self._net)
        self._kinds = DynamicCache(config=self._config).layers
        self._attending = sum(isinstance(kind, CacheLayerMixin) for kind in self._kinds)
        self._max_length = max_positions(self._config) if self._attending else None
        self._vocab_size = head_size(self._net)
        self._states = LayerStates.of(self._net)
        accepted = signature(self._net.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
        self._mixers = attempt(model, self._found_mixers)
        self._shapes: tuple[LayerShape, ...] = ()
        self._pool_refusal = self._prepare_pool()
        attempt(model, self._avoid_replays)
        probe_causality(self, model, self._probed_cache)
        new_caches = [self.new_cache] if self._pool_refusal is not None else [self.new_cache, self._probed_cache]
        probe_recurrence(self, model, new_caches, self._cache_of_made_up_states, settled_states)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def device(self) -> torch.device:
        return torch.device(self._net.device)

    @property
    def pool_refusal(self) -> str | None:
        """Return why keys and values are not kept in a pool; None if they are."""
        return self._pool_refusal

    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of the keys and values in a pool, for each attention layer; none without a pool."""
        return self._shapes

    def new_cache(self, rows: int, capacity: int = 0) -> HybridCache:
        return self.empty_cache(SlotCache(self._attending, rows, capacity, self.device), rows)

    def empty_cache(self, slots: SlotCache | PooledSlots, rows: int) -> HybridCache:
        """Return a cache of new rows whose keys and values will be in these slots."""
        states = {mixer.layer: mixer.zeros(rows) for mixer in self._mixers}
        return HybridCache(self._kinds, self._mixers, slots, states)

    def _prepare_pool(self) -> str | None:
        """Let attention layers read a pool, and learn its shapes; return why not, and change nothing then.

        Attention is a function of ours, so a model must look its attention up by name. Whether it does is seen in a
        pass over one token, in which every layer that keeps keys must ask our function once.
        """
        if not self._attending:
            return "the model has no attention layers"
        if not is_cpu(self.device):
            return f"on {self.device.type} passes over a pool do not serve mixers yet"
        before = self._config._attn_implementation
        register()
        try:
            self._net.set_attn_implementation(ATTENTION_NAME)
            cache, asked = self.new_cache(1), OneTokenPass()
            with attending(asked):
                self(torch.zeros((1, 1), dtype=torch.long), cache)
            keeping = sum(layer.is_initialized for layer in cache.slots.layers)
            if asked.layers == keeping:
                self._shapes = tuple(written_shape(layer) for layer in cache.slots.layers)
                return None
            reason = f"of {keeping} layers with keys and values, {asked.layers} use transformers' attention interface"
        except Exception as error:  # attention that is not looked up by name may be anything
            reason = f"its attention is not transformers' ({type(error).__name__}: {error})"
        self._net.set_attn_implementation(before)
        return reason

    def _probed_cache(self, rows: int) -> HybridCache:
        return self.empty_cache(self._probed_slots(rows), rows)

    def _probed_slots(self, rows: int) -> SlotCache | PooledSlots:
        """Return the slots of new rows as an engine has them: where there is a pool, in one with a page for each."""
        if self._pool_refusal is not None:
            return SlotCache(self._attending, rows, 0, self.device)
        pool = KVPool(self._shapes, rows, self.device)
        for row in range(rows):
            pool.enter(row, 1)
        return PooledSlots(pool, list(pool.rows.values()))

    def _cache_of_made_up_states(self, rows: int) -> HybridCache:
        """Return empty rows whose recurrent states are random numbers, always the same."""
        generator = torch.Generator().manual_seed(1)
        states = {
            mixer.layer: {
                key: torch.randn(zeros.shape, generator=generator).to(zeros) for key, zeros in mixer.zeros(rows).items()
            }
            for mixer in self._mixers
        }
        return HybridCache(self._kinds, self._mixers, self._probed_slots(rows), states)

    def open_rows(self, pages: int) -> "HybridRows":
        return HybridRows(self) if self._pool_refusal is not None else PooledHybridRows(self, pages)

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` as the continuation of each cached row; see `Model`."""
        if not isinstance(cache, HybridCache):
            raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's new_cache()")
        if parents is not None:
            raise ValueError(NO_TREES)
        check_pass(tokens, parents, scored, len(cache.lengths))
        check_layers(layers, self._config.num_hidden_layers)
        with torch.inference_mode(), steady_attention(tokens.device):
            with recording(cache.start_pass(tokens.shape[1], self._max_length)):
                outputs = self._logits_and_states(tokens, cache, scored or 0, tuple(layers))
            cache.finish_pass()
        logits, *hidden = (outside_inference_mode(output) for output in outputs)
        return Forward(logits, tuple(hidden))

    def _logits_and_states(
        self, tokens: Int[Tensor, "B T"], cache: HybridCache, scored: int, layers: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Return the logits, then the states after these layers."""
        run = partial(self._run, cache.past, input_ids=tokens, logits_to_keep=scored)
        if not self._attending:
            return self._collected(run, layers)
        if isinstance(cache.slots, SlotCache):
            view = chain_view(cache.slots.place(cache.lengths), cache.slots.reach)
            eager = self._config._attn_implementation == "eager"
            # Four dimensions: transformers passes such a mask to attention as it is, and none to the mixers.
            mask = additive_mask(view.visible[:, None], self._net.dtype) if eager else view.visible[:, None]
            run = partial(run, attention_mask=mask, position_ids=self._clamped(view.positions))
            return self._collected(run, layers)
        this = cache.slots.rectangle(tokens)
        (mask,) = this.packed.placeholders().values()
        positions = cache.lengths[:, None] + torch.arange(tokens.shape[1])
        with attending(this):
            run = partial(run, attention_mask=mask, position_ids=self._clamped(positions))
            return self._collected(run, layers)

    def _clamped(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Clamp positions to the model's last one: padding may lie past it."""
        return positions if self._max_length is None else positions.clamp(max=self._max_length - 1)

    def _collected(self, run: Callable[..., Any], layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Run a pass; return its logits, then the states after these layers."""
        if not layers:
            return (run().logits,)
        if self._states is not None:
            return self._states.collect(layers, lambda: run().logits)
        out = run(output_hidden_states=True)
        return (out.logits, *(out.hidden_states[layer] for layer in layers))

    @torch.inference_mode()
    def _found_mixers(self) -> list[Mixer]:
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        layers = DynamicCache(config=self._config).layers
        return find_mixers(self._net, layers, partial(self._run, input_ids=tokens, logits_to_keep=1))

    def _avoid_replays(self) -> None:
        """Replay only mixers for which replay and what their scans read give different states.

        From zero states, what a pass writes is not hidden by what was there; from made-up ones, it depends on them.
        """
        rows = len(ROLLBACKS[0])
        tokens = torch.arange(5 * rows, device=self.device).view(rows, 5) % self._vocab_size
        agreeing = {mixer.layer for mixer in self._mixers}
        for cache in (self.new_cache(rows), self._cache_of_made_up_states(rows)):
            for mixer in self._mixers:
                mixer.replayed = True  # so that all is recorded
            self(tokens, cache)
            for counts in ROLLBACKS:
                agreeing &= cache.agreeing(counts)
        for mixer in self._mixers:
            mixer.replayed = mixer.layer not in agreeing

    def _run(self, past: TransformersCache, **inputs: Any) -> Any:
        return self._net(**{self._cache_name: past}, use_cache=True, return_dict=True, **inputs)


class HybridRows(RectangularRows):
    """Rows of a hybrid model: prompts are read in runs of equal length, and in pieces."""

    def _read(self, reading: Sequence[Reading], layers: Sequence[int]) -> list[Read]:
        read: dict[int, Read] = {}
        by_length: dict[int, list[Reading]] = {}
        for each in reading:
            by_length.setdefault(len(each.tokens), []).append(each)
        for length, run in by_length.items():
            read |= dict(zip([each.row for each in run], self._read_run(run, length, layers), strict=True))
        return [read[each.row] for each in reading]

    def _read_run(self, run: Sequence[Reading], length: int, layers: Sequence[int]) -> list[Read]:
        """Read prompts of one length piece by piece, and add their rows to the cache."""
        cache = self._new_cache([each.row for each in run], length)
        scored = None if any(each.scored for each in run) else 1
        pieces = []
        for start in range(0, length, PIECE):
            tokens = self._padded([each.tokens[start : start + PIECE] for each in run])
            pieces.append(self._model(tokens, cache, scored=scored, layers=layers))
            cache.keep(torch.full((len(run),), tokens.shape[1]))
        self._cache = cache if self._cache is None else self._cache.join(cache)
        self._rows += [each.row for each in run]
        if not pieces:
            return [Read((), None) for _ in run]
        logits = torch.cat([piece.logits for piece in pieces], 1)
        hidden = [torch.cat(states, 1) for states in zip(*(piece.hidden for piece in pieces), strict=True)]
        return [Read(tuple(states[b] for states in hidden), logits[b]) for b in range(len(run))]


class SavedHybrid(NamedTuple):
    """A row that was taken out: its recurrent states, and its keys and values."""

    states: HybridCache
    kept: SavedRow


class PooledHybridRows(HybridRows):
    """Rows of a hybrid model with keys and values in a pool: only their states are copied when rows come and go."""

    pool: KVPool

    def __init__(self, model: HybridModel, pages: int) -> None:
        super().__init__(model)
        self._hybrid = model
        self.pool = KVPool(model.kv_shapes(), pages, model.device)

    def enter(self, row: int, tokens: int, source: Sequence[int] | None = None) -> None:
        self.pool.enter(row, tokens)
        super().enter(row, tokens, source)

    def leave(self, row: int) -> None:
        self.pool.leave(row)
        super().leave(row)

    def ensure(self, row: int, tokens: int) -> None:
        self.pool.ensure(row, tokens)

    def save(self, row: int) -> SavedHybrid:
        return SavedHybrid(super().save(row), self.pool.save(row))

    def restore(self, row: int, saved: SavedHybrid) -> None:
        self.pool.restore(row, saved.kept)
        super().restore(row, saved.states.with_slots(self._slots([row])))

    def _new_cache(self, rows: Sequence[int], capacity: int) -> HybridCache:
        for row in rows:
            del self._entering[row]
        return self._hybrid.empty_cache(self._slots(rows), len(rows))

    def _slots(self, rows: Sequence[int]) -> PooledSlots:
        return PooledSlots(self.pool, [self.pool.rows[row] for row in rows])
