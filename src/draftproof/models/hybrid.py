"""Serve models with recurrent layers, alone or beside attention: Qwen3.5, LFM2, Falcon-H1, Mamba-2 and others.

Attention layers keep their tokens in a KV pool (pooled_slots.py), or in a slot cache where `pool_refusal` says why.
Recurrent layers are rolled back (hybrid_cache.py, recurrent.py). Padding is never kept, so it leaves no trace in a
state; prompts are read in runs of equal length, where nothing is rolled back (hybrid_rows.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from draftproof.core.device import is_cpu
from draftproof.models.attention import ATTENTION_NAME, register, steady_attention
from draftproof.models.cache import SlotCache, outside_inference_mode
from draftproof.models.compatibility import (
    decoder_config,
    head_size,
    is_quantized,
    max_positions,
    refuse_unsupported,
)
from draftproof.models.hf import LayerStates
from draftproof.models.hybrid_cache import NO_TREES, HybridCache, settled_states
from draftproof.models.hybrid_rows import HybridRows, PooledHybridRows
from draftproof.models.interface import Cache, Forward
from draftproof.models.masks import additive_mask, chain_view
from draftproof.models.packed import attending, check_layers, check_pass
from draftproof.models.pool import KVPool, LayerShape
from draftproof.models.pooled_slots import OneTokenPass, PooledSlots, written_shape
from draftproof.models.probe import attempt, probe_causality, probe_recurrence
from draftproof.models.recurrent import (
    Mixer,
    find_mixers,
    recording,
)
from draftproof.models.weight_sharing import copy_for_slot_cache, run_once

ROLLBACKS: Final = ({0: 2, 1: 4, 2: 0}, {0: 3, 1: 3, 2: 3})
"""Tokens that rows keep of a pass over five, by row, where both ways to roll back are compared.

Not one: a replay of one token takes a step, which in half precision some mixers round more coarsely than a scan."""


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
