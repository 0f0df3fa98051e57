"""Serve any causal language model of transformers, in ragged batches and trees: over a pool, else rectangular.

`LayerStates` takes the hidden states that a head reads out of a pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from draftproof.core.device import is_cpu
from draftproof.models.attention import ATTENTION_NAME, steady_attention
from draftproof.models.cache import SlotCache, outside_inference_mode
from draftproof.models.compatibility import (
    attention_windows,
    cached_layers,
    decoder_config,
    head_size,
    is_quantized,
    max_positions,
    packing_refusal,
    refuse_unsupported,
)
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.device_pass import NO_LIMIT, DevicePass, DevicePool
from draftproof.models.fused import Fusion, fuse
from draftproof.models.interface import Cache, Forward
from draftproof.models.masks import View, additive_mask, chain_view, take_over_alibi, tree_view
from draftproof.models.packed import PackedPass, Span, attending, check_layers, check_pass
from draftproof.models.pool import LayerShape
from draftproof.models.probe import needs_probe, probe
from draftproof.models.slot_pass import over_slots
from draftproof.models.weight_sharing import copy_first_layers, copy_for_slot_cache, decoder_stack, run_once

GPU_COSTS: Final[Mapping[str, float]] = {
    "pass_growth": 0.003, "draft_cost": 0.2, "compute_bound": 256, "rectangular": True, "resume_cost": 5.0
}  # fmt: skip
"""Costs on a GPU: weights are read once for hundreds of positions, all rows of a pass are as wide as the widest, and a
draft model that has paused reads on in a pass that is not recorded."""

Masks = Tensor | None | dict[str, Tensor | None]


class HFModel:
    """A causal language model of transformers as a `Model`.

    The object passed in is never altered: a structural copy that shares its weights is run (weight_sharing.py). Move it
    to its device and call `eval()` first; training mode is refused. Only padding may lie past `max_length`.

    Some models are probed with a few tokens first (probe.py), and refused if a later token moves earlier logits or if
    a ragged batch differs from a plain forward: families that our tests do not cover; every quantised model; and code
    from outside of transformers, such as adapters and models loaded with `trust_remote_code=True` (pass these as
    objects: names are loaded without remote code). A model must be on one CPU or CUDA device as a whole: several
    devices (`device_map="auto"`), offloading and other devices, such as "mps", are refused.

    graphs   on a GPU, capture short passes as CUDA graphs and replay them
    drafter  the model drafts: it cannot change the text's distribution, so less is probed
    probed   the caller has probed the model that this one is a part of
    fused    run layers that are built like Llama's with few calls (fused.py). On a GPU it costs a copy of their weights
             unless they lie side by side (`lay_side_by_side`: models loaded by name), and weights that change in place
             afterwards are not followed. On a CPU, in float32, it costs nothing
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        graphs: bool = True,
        drafter: bool = False,
        probed: bool = False,
        fused: bool = True,
    ) -> None:
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} has an encoder: use EncoderDecoder (models/encoder_decoder.py)")
        refuse_unsupported(model)
        self.graph_cache = GraphCache(None if graphs else SWITCHED_OFF)
        if is_quantized(model):
            run_once(model)
        self._net = copy_for_slot_cache(model, packed=packing_refusal(model) is None)
        self._config = decoder_config(self._net)
        self._alibi = take_over_alibi(self._net)
        self._max_length = None if self._alibi else max_positions(self._config)
        self.fusion = fuse(self._net, self._max_length) if fused and not is_quantized(model) else Fusion()
        self._layers = cached_layers(self._config)
        self._windows = attention_windows(self._config)
        self._vocab_size = head_size(self._net)
        self._states = LayerStates.of(self._net)
        self._parts: dict[int, HFModel] = {}
        self._kinds = tuple(self._windows.items())
        self._shapes: tuple[LayerShape, ...] | None = None
        # Found once: transformers walks all modules for it.
        self._device, self._packing_refusal = torch.device(self._net.device), packing_refusal(self._net)
        if not probed and needs_probe(model, drafter=drafter):
            probe(self, model, self._windows, drafter=drafter)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def device(self) -> torch.device:
        return self._device

    def new_cache(self, rows: int, capacity: int = 0) -> SlotCache:
        return SlotCache(self._layers, rows, capacity, self.device)

    def first_layers(self, count: int) -> "HFModel":
        """Return a model of the first `count` layers, the norm and the output layer, on the same weights.

        As a drafter it costs no memory but its own cache. It is made once for each count.
        """
        if count not in self._parts:
            graphs = self.graph_cache.refusal is None
            self._parts[count] = HFModel(copy_first_layers(self._net, count), graphs=graphs, probed=True, fused=False)
        return self._parts[count]

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
        if not isinstance(cache, SlotCache):
            raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's new_cache()")
        check_pass(tokens, parents, scored, len(cache.lengths))
        check_layers(layers, self._config.num_hidden_layers)
        if self.packing_refusal is None and is_cpu(tokens.device):
            return over_slots(self, tokens, cache, parents, scored, tuple(layers))
        with torch.inference_mode():
            cache.reserve(tokens.shape[1], self._max_length)
            body = partial(self._logits_and_states, cache=cache, scored=scored or 0, layers=tuple(layers))
            inputs = (tokens, cache.lengths) if parents is None else (tokens, cache.lengths, parents)
            if scored is None and cache.bound > 0 and not is_cpu(tokens.device):
                outputs = self.graph_cache.run(body, inputs, cache.reach, cache.recordings, tuple(layers))
            else:
                outputs = body(*inputs)
        logits, *hidden = (outside_inference_mode(output) for output in outputs)
        return Forward(logits, tuple(hidden))

    @property
    def packing_refusal(self) -> str | None:
        """Return why passes are not packed; None where they are."""
        return self._packing_refusal

    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of each layer's keys and values, learnt from a pass over one token."""
        if self._shapes is None:
            layers = [ShapeLayer() for _ in range(self._layers)]
            with torch.inference_mode():
                one = self.packed_pass(torch.zeros(1, dtype=torch.long, device=self.device), [Span(0, 0, 1)])
                self._over_pool(one, one.tokens[None], one.positions[None], TransformersCache(layers=layers), 1, ())
            self._shapes = tuple(layer.shape for layer in layers)
        return self._shapes

    @property
    def assumed_costs(self) -> Mapping[str, float]:
        """Return what passes and drafts of this model cost before any was measured, as fields of `Costs`."""
        return {} if is_cpu(self.device) else GPU_COSTS

    def packed_pass(self, tokens: Int[Tensor, " N"], spans: Sequence[Span]) -> PackedPass:
        """Return a pass over these tokens, span after span."""
        return PackedPass(tokens, spans, self._kinds)

    def packed(
        self,
        this: PackedPass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        scored: int | Int[Tensor, " J"],
        layers: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "J V"], tuple[Float[Tensor, "N H"], ...]]:
        """Run a packed pass over a pool's buffers; return the logits that are wanted, and the states after `layers`.

        scored  the last so many tokens of the pass, or the indices of those that get logits
        """
        check_layers(layers, self._config.num_hidden_layers)
        with torch.inference_mode(), steady_attention(self.device):
            past = _pool_cache(keys, values, this.slots)
            positions = self._clamped(this.positions[None])
            logits, *hidden = self._over_pool(this, this.tokens[None], positions, past, scored, tuple(layers))
        return logits[0], tuple(states[0] for states in hidden)

    def device_pass(
        self,
        tokens: Int[Tensor, "B T"],
        places: Int[Tensor, "3 B"],
        pool: DevicePool,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        last: bool = False,
        layers: Sequence[int] = (),
        recorded: bool = True,
    ) -> Forward:
        """Run a pass over a pool on a GPU, by replay if one of its shapes was recorded; see `DevicePass`.

        last      give the logits after each row's last token only, as [B, 1, V]
        recorded  False where the caller records the pass as a part of something larger
        """
        check_layers(layers, self._config.num_hidden_layers)
        B, T = tokens.shape
        body = partial(self._device_logits_and_states, pool=pool, last=last, layers=tuple(layers))
        inputs = (tokens, places) if parents is None else (tokens, places, parents)
        with torch.inference_mode():
            if recorded:
                logits, *hidden = self.graph_cache.run(body, inputs, 0, pool.recordings, (last, tuple(layers)))
            else:
                logits, *hidden = body(*inputs)
            return Forward(logits.view(B, 1 if last else T, -1), tuple(states.view(B, T, -1) for states in hidden))

    def _device_logits_and_states(
        self,
        tokens: Int[Tensor, "B T"],
        places: Int[Tensor, "3 B"],
        parents: Int[Tensor, "B K"] | None = None,
        *,
        pool: DevicePool,
        last: bool,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        """Return the logits, then the states after these layers, without a sync, so that it can be captured."""
        B, T = tokens.shape
        last_position = NO_LIMIT if self._max_length is None else self._max_length - 1
        this = DevicePass(tokens, places, pool.scratch, pool.capacity, self._kinds, parents, last_position)
        past = _pool_cache(pool.keys, pool.values, this.slots)
        scored = this.ends if last and T > 1 else B * T
        return self._over_pool(this, tokens.view(1, -1), this.positions, past, scored, layers)

    def _over_pool(
        self,
        this: PackedPass | DevicePass,
        tokens: Int[Tensor, "1 N"],
        positions: Int[Tensor, "1 N"],
        past: TransformersCache,
        scored: int | Int[Tensor, " J"],
        layers: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        """Return the logits of a pass whose rows lie in a pool, then the states after these layers."""
        masks = this.placeholders()
        run = partial(
            self._net,
            input_ids=tokens,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=scored,
            return_dict=True,
        )
        with attending(this):
            if not layers:
                return (run().logits,)
            if self._states is not None:
                return self._states.collect(layers, lambda: run().logits)
            out = run(output_hidden_states=True)
            return (out.logits, *(out.hidden_states[layer] for layer in layers))

    def _logits_and_states(
        self,
        tokens: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        parents: Int[Tensor, "B K"] | None = None,
        *,
        cache: SlotCache,
        scored: int,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        """Return the logits, then the states after these layers.

        It must not synchronise with the GPU, so that it can be captured as a CUDA graph.
        """
        run = partial(self._pass, tokens, lengths, cache, parents, scored)
        with steady_attention(tokens.device):
            if not layers:
                return (run().logits,)
            if self._states is not None:
                return self._states.collect(layers, lambda: run().logits)
            out = run(hidden=True)  # no single stack of layers to take states from: transformers keeps those of all
            return (out.logits, *(out.hidden_states[layer] for layer in layers))

    def _pass(
        self,
        tokens: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        cache: SlotCache,
        parents: Int[Tensor, "B K"] | None,
        scored: int,
        hidden: bool = False,
    ) -> Any:
        slots = cache.place(lengths)
        view = chain_view(slots, cache.reach) if parents is None else tree_view(slots, cache.reach, parents)
        maskless = cache.is_plain_causal and parents is None and self._config._attn_implementation == ATTENTION_NAME
        return self._net(
            input_ids=tokens,
            attention_mask=self._masks(view, maskless),
            position_ids=self._clamped(view.positions),
            past_key_values=cache.past,
            use_cache=True,
            logits_to_keep=scored,
            output_hidden_states=hidden,
            return_dict=True,
        )

    def _clamped(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Clamp positions to the model's last one: padding past it would read a position table out of bounds."""
        return positions if self._max_length is None else positions.clamp(max=self._max_length - 1)

    def _masks(self, view: View, maskless: bool) -> Masks:
        """Return one mask if all layers attend alike, else one for each kind of layer."""
        masks = {kind: self._mask(view, kind, size, maskless) for kind, size in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, view: View, kind: str, size: int | None, maskless: bool) -> Tensor | None:
        if size is not None and view.columns.shape[1] > size:
            view, maskless = view.chunked(size) if kind == "chunked_attention" else view.windowed(size), False
        if maskless:
            return None
        visible = view.visible[:, None]
        dtype = self._net.dtype
        if self._alibi is not None:
            return torch.where(visible, self._alibi(view.columns, dtype), torch.finfo(dtype).min)
        return additive_mask(visible, dtype) if self._config._attn_implementation == "eager" else visible


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers dispatches on this class
    """One layer of a pool as transformers sees it during one packed pass."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Int[Tensor, " N"]) -> None:
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pool's buffers exist before its first pass."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values to their slots, and return the whole pool, `[1, heads, slots, size]`."""
        self.keys.index_copy_(0, self.slots, key_states[0].transpose(0, 1))
        self.values.index_copy_(0, self.slots, value_states[0].transpose(0, 1))
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class ShapeLayer(PoolLayer):
    """A layer that keeps the keys and values of a single token, to learn their sizes before a pool exists."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long))

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    @property
    def shape(self) -> LayerShape:
        _, heads, _, size = self.keys.shape if self.keys.ndim == 4 else (1, 0, 1, 0)
        return LayerShape(heads, size, self.values.shape[-1] if self.values.ndim == 4 else 0, self.keys.dtype)


def _pool_cache(keys: Sequence[Tensor], values: Sequence[Tensor], slots: Int[Tensor, " N"]) -> TransformersCache:
    """Return the layers of a pool as transformers sees them in one pass."""
    return TransformersCache(layers=[PoolLayer(k, v, slots) for k, v in zip(keys, values, strict=True)])


_collected: ContextVar[dict[int, Tensor | None] | None] = ContextVar("collected hidden states", default=None)
"""The layers whose states the running pass collects. A context variable, so that threads may share a model."""


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The places in a model where states are taken: after each decoder layer, and after the norm for the last.

    A layer gets its hook when its states are first requested; other layers run as before.
    """

    places: tuple[nn.Module, ...]

    @classmethod
    def of(cls, net: PreTrainedModel) -> "LayerStates | None":
        """Find the places in our copy of a model; None if it has no single stack of decoder layers."""
        stack = decoder_stack(net)
        if stack is None:
            return None
        parent, name = stack
        # The stack's parent returns the last layer's states after the norm.
        places = (*list(getattr(parent, name))[:-1], parent)
        for module in (parent, *getattr(parent, name)):  # a copy of a copy may have hooks of another count of layers
            for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, _Hook)]:
                del module._forward_hooks[key]
        return cls(places)

    def collect(self, layers: Sequence[int], run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Return the result of a pass, then the states after these layers (1 is the first)."""
        for layer in layers:
            self._install(layer)
        states: dict[int, Tensor | None] = dict.fromkeys(layers)
        token = _collected.set(states)
        try:
            result = run()
        finally:
            _collected.reset(token)
        return (result, *(self._found(states, layer) for layer in layers))

    def _install(self, layer: int) -> None:
        place = self.places[layer - 1]
        if not any(isinstance(hook, _Hook) for hook in list(place._forward_hooks.values())):
            place.register_forward_hook(_Hook(layer))

    def _found(self, states: dict[int, Tensor | None], layer: int) -> Tensor:
        state = states[layer]
        if state is None:
            raise ValueError(
                f"layer {layer} of this model ({type(self.places[layer - 1]).__name__}) was not called in the pass, so "
                "its hidden states are not known: use a drafter other than a head"
            )
        return state


@dataclass(frozen=True, slots=True)
class _Hook:
    """Forward hook that hands over the module's hidden states, the first of its outputs, if the pass collects them."""

    layer: int

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        states = _collected.get()
        if states is not None and self.layer in states:
            states[self.layer] = output if isinstance(output, Tensor) else output[0]
