"""Any Hugging Face causal language model, served over a slot cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from draftproof.models import masks as alibi
from draftproof.models.attention import NAME, steady_attention
from draftproof.models.cache import SlotCache, released
from draftproof.models.compatibility import (
    TRIED,
    cached_layers,
    check_layers,
    check_pass,
    decoder_config,
    furthest,
    head_size,
    probe,
    refuse_at_the_door,
)
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.interface import Cache, Forward
from draftproof.models.masks import View, additive, chain, tree
from draftproof.models.weight_sharing import attentive, shortened

Masks = Tensor | None | dict[str, Tensor | None]


class HFModel:
    """A causal language model of transformers as a `Model`.

    The object passed in is never altered: a structural copy that shares its weights is run (shadow.py). Move it to its
    device and call `eval()` before; training mode is refused. Positions past `max_length` belong to padding only.
    Families that our tests do not cover are tried on a few tokens first (probe.py), and refused where they differ.
    On a GPU short passes are recorded and replayed, unless `graphs` is False.
    """

    def __init__(self, model: PreTrainedModel, *, graphs: bool = True) -> None:
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} has an encoder: use EncoderDecoder (models/encoder_decoder.py)")
        refuse_at_the_door(model)
        self.recorder = GraphCache(None if graphs else SWITCHED_OFF)
        self._net = attentive(model)
        self._config = decoder_config(self._net)
        self._bias = alibi.take_over(self._net)
        self._layers = cached_layers(self._config)
        self._windows = _windows(self._config)
        self._max_length = None if self._bias else furthest(self._config)
        self._vocab_size = head_size(self._net)
        if self._config.model_type not in TRIED:
            probe(self, model)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def device(self) -> torch.device:
        return torch.device(self._net.device)

    def new_cache(self, rows: int, capacity: int = 0) -> SlotCache:
        return SlotCache(self._layers, rows, capacity, self.device)

    def first_layers(self, count: int) -> "HFModel":
        """This model's first `count` layers, its norm and its head, on the same weights: a drafter that costs no
        memory. Its cache is its own."""
        return HFModel(shortened(self._net, count), graphs=self.recorder.refusal is None)

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` behind what the cache remembers; see `Model`."""
        if not isinstance(cache, SlotCache):
            raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's new_cache()")
        check_pass(tokens, parents, scored, len(cache.lengths))
        check_layers(layers, self._config.num_hidden_layers)
        with torch.inference_mode():
            cache.reserve(tokens.shape[1], self._max_length)
            body = partial(self._shown, cache=cache, scored=scored or 0, layers=tuple(layers))
            inputs = (tokens, cache.lengths) if parents is None else (tokens, cache.lengths, parents)
            if scored is None and cache.bound > 0:
                made = self.recorder.run(body, inputs, cache.reach, cache.recordings, tuple(layers))
            else:
                made = body(*inputs)
        logits, *hidden = (released(part) for part in made)
        return Forward(logits, tuple(hidden))

    def _shown(
        self,
        tokens: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        parents: Int[Tensor, "B K"] | None = None,
        *,
        cache: SlotCache,
        scored: int,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        """The logits, and the states after these layers. On a GPU nothing here may wait for it, so that it can be
        recorded."""
        with steady_attention(tokens.device):
            out = self._pass(tokens, lengths, cache, parents, scored, bool(layers))
        return (out.logits, *(out.hidden_states[layer] for layer in layers))

    def _pass(
        self,
        tokens: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        cache: SlotCache,
        parents: Int[Tensor, "B K"] | None,
        scored: int,
        hidden: bool,
    ) -> Any:
        slots = cache.place(lengths)
        view = chain(slots, cache.reach) if parents is None else tree(slots, cache.reach, parents)
        plain = cache.plain and parents is None and self._config._attn_implementation == NAME
        return self._net(
            input_ids=tokens,
            attention_mask=self._masks(view, plain),
            position_ids=self._within(view.positions),
            past_key_values=cache.past,
            use_cache=True,
            logits_to_keep=scored,
            output_hidden_states=hidden,
            return_dict=True,
        )

    def _within(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Padding may stand past the last position the model has; a table would be read out of bounds there."""
        return positions if self._max_length is None else positions.clamp(max=self._max_length - 1)

    def _masks(self, view: View, plain: bool) -> Masks:
        """One mask where all layers look the same way, else one for each kind of layer."""
        masks = {kind: self._mask(view, kind, size, plain) for kind, size in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, view: View, kind: str, size: int | None, plain: bool) -> Tensor | None:
        if size is not None and view.columns.shape[1] > size:
            view, plain = view.chunked(size) if kind == "chunked_attention" else view.windowed(size), False
        if plain:
            return None
        visible = view.visible[:, None]
        dtype = self._net.dtype
        if self._bias is not None:
            return torch.where(visible, self._bias(view.columns, dtype), torch.finfo(dtype).min)
        return additive(visible, dtype) if self._config._attn_implementation == "eager" else visible


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of layers in a model, and how far each looks; None: everywhere."""
    sizes = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # as transformers infers it
        kinds = [next((kind for kind in ("sliding_attention", "chunked_attention") if sizes[kind]), "full_attention")]
    return {kind: sizes[kind] for kind in dict.fromkeys(kinds)}
