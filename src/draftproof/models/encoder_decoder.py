"""Serve encoder-decoder models of transformers (T5, BART) over a slot cache.

Their decoders use one position count for all rows, so rows of different lengths cannot share a pass. Neighbouring rows
of equal length share one; each such run gets a pass of its own on the same buffers. A tree would need a position for
each slot and is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from draftproof.core.types import InexactError
from draftproof.models.cache import SlotCache
from draftproof.models.compatibility import (
    decoder_config,
    has_foreign_code,
    head_size,
    is_quantized,
    max_positions,
    refuse_unsupported,
)
from draftproof.models.interface import Cache, Forward
from draftproof.models.masks import additive_mask, chain_view
from draftproof.models.packed import check_layers, check_pass
from draftproof.models.probe import probe_causality
from draftproof.models.weight_sharing import run_once, structural_copy

NO_TREES = "encoder-decoder models count positions by slot, so a tree cannot be scored: use a rule for chains"


class EncoderDecoder:
    """An encoder-decoder model of transformers as a `Model`.

    The sources are encoded once: `cache = model.encode(sources)`. A pass then scores tokens of the answer; the first
    token of every answer is `start`, which the caller feeds like any other. The object passed in is never altered.
    Quantised models and code from outside of transformers are refused if a later token moves earlier logits (probe.py),
    unless the model drafts (`drafter`). For devices see `HFModel`.
    """

    def __init__(self, model: PreTrainedModel, *, drafter: bool = False) -> None:
        if not model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} has no encoder: use HFModel (models/hf.py)")
        refuse_unsupported(model)
        quantized = is_quantized(model)
        if quantized:
            run_once(model)
        self._net = structural_copy(model)
        self._config = decoder_config(self._net)
        self._adds_mask = self._config._attn_implementation == "eager"
        self._max_length = max_positions(self._config)
        if not drafter and (quantized or has_foreign_code(model)):
            probe_causality(self, model, lambda rows: self.encode([[self.start]] * rows))

    @property
    def vocab_size(self) -> int:
        return head_size(self._net)

    @property
    def max_length(self) -> int | None:
        """Return the number of positions in an answer; None if there is no limit."""
        return self._max_length

    @property
    def device(self) -> torch.device:
        return torch.device(self._net.device)

    @property
    def start(self) -> int:
        """Return the token that begins every answer."""
        for settings in (self._net.generation_config, self._net.config):
            token = getattr(settings, "decoder_start_token_id", None)
            if token is not None:
                return int(token)
        raise ValueError(
            f"{type(self._net).__name__} names no start token: set generation_config.decoder_start_token_id"
        )

    def new_cache(self, rows: int, capacity: int = 0) -> Cache:
        """Refuse: a cache of this model needs sources, see `encode`."""
        raise ValueError(f"{type(self._net).__name__} answers a source: take its cache from encode(sources)")

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]], capacity: int = 0) -> "SourceCache":
        """Encode one source for each row; return a cache that holds them and empty answers."""
        tokens, present = _padded_batch(sources)
        present = present.to(self.device)
        encoder = self._net.get_encoder()
        states = encoder(input_ids=tokens.to(self.device), attention_mask=present.long()).last_hidden_state
        return self._project_keys(Source(states, present), capacity)

    def _project_keys(self, source: "Source", capacity: int) -> "SourceCache":
        """Run the start token once, keeping nothing, so that transformers computes the cross-attention's keys."""
        rows = len(source.present)
        cross = DynamicCache(config=self._config)
        answer = SlotCache(len(cross.layers), rows, capacity, self.device)
        self._pass(torch.full((rows, 1), self.start, device=self.device), answer, source, cross, hidden=False)
        keys, values = (tuple(getattr(layer, name) for layer in cross.layers) for name in ("keys", "values"))
        return SourceCache(Source(source.states, source.present, keys, values), answer)

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` as the continuation of each row's answer; see `Model`."""
        if not isinstance(cache, SourceCache):
            raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's encode()")
        if parents is not None:
            raise InexactError(NO_TREES)
        check_pass(tokens, None, scored, len(cache.lengths))
        check_layers(layers, self._config.num_hidden_layers)
        cache.answer.open(tokens.shape[1], self._max_length)
        with torch.inference_mode():
            parts = [self._score_run(tokens[rows], cache, rows, length, layers) for rows, length in cache.runs()]
        # Concatenated outside of inference mode, so that the result is ordinary tensors.
        logits = torch.cat([part.logits[:, -(scored or 0) :] for part in parts])
        return Forward(
            logits, tuple(torch.cat(states) for states in zip(*(part.hidden for part in parts), strict=True))
        )

    def _score_run(
        self, tokens: Int[Tensor, "b T"], cache: "SourceCache", rows: slice, length: int, layers: Sequence[int]
    ) -> Forward:
        """Score neighbouring rows of equal length. Padding past the model's last position is left out of the pass."""
        source = cache.source.rows(rows)
        room = len(tokens[0]) if self._max_length is None else self._max_length - length
        answer = cache.answer.rows_view(rows, length)
        out = self._pass(tokens[:, :room], answer, source, source.as_cross_attention_cache(), hidden=bool(layers))

        def full(part: Tensor) -> Tensor:
            return torch.nn.functional.pad(part, (0, 0, 0, tokens.shape[1] - part.shape[1]))

        return Forward(full(out.logits), tuple(full(out.decoder_hidden_states[layer]) for layer in layers))

    def _pass(
        self, tokens: Int[Tensor, "b T"], answer: SlotCache, source: "Source", cross: TransformersCache, *, hidden: bool
    ) -> Any:
        visible = chain_view(answer.open(tokens.shape[1]), answer.reach).visible[:, None]
        return self._net(
            encoder_outputs=BaseModelOutput(last_hidden_state=source.states),
            attention_mask=source.present.long(),
            decoder_input_ids=tokens,
            decoder_attention_mask=additive_mask(visible, self._net.dtype) if self._adds_mask else visible,
            past_key_values=EncoderDecoderCache(answer.past, cross),
            use_cache=True,
            output_hidden_states=hidden,
            return_dict=True,
        )


class SourceCache:
    """A source and the answer so far, for each row."""

    def __init__(self, source: "Source", answer: SlotCache) -> None:
        self.source = source
        self.answer = answer

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of answer tokens cached in each row. Assigning smaller lengths truncates the answers."""
        return self.answer.lengths

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        self.answer.lengths = lengths

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each answer by its first `counts` tokens of the last pass; refuse the path of a tree."""
        if path is not None:
            raise InexactError(NO_TREES)
        self.answer.keep(counts)

    def take(self, rows: Sequence[int]) -> "SourceCache":
        """Return a cache of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.source.states.device)
        return SourceCache(self.source.rows(index), self.answer.take(rows))

    def join(self, other: Cache) -> "SourceCache":
        """Return a cache of these rows followed by the rows of `other`."""
        if not isinstance(other, SourceCache):
            raise ValueError(f"other is a {type(other).__name__}: a SourceCache can be joined only with a SourceCache")
        return SourceCache(self.source.join(other.source), self.answer.join(other.answer))

    def runs(self) -> Iterator[tuple[slice, int]]:
        """Yield runs of neighbouring rows with equal length, and that length: each run can share a pass.

        Reads the lengths on the host, which synchronises with a GPU once in every pass.
        """
        lengths = self.lengths.tolist()
        first = 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[first]:
                yield slice(first, row), lengths[first]
                first = row


@dataclass(frozen=True, slots=True)
class Source:
    """The encoder's states, and each decoder layer's cross-attention keys and values of them."""

    states: Float[Tensor, "B S H"]
    present: Bool[Tensor, "B S"]
    """False for padding."""
    keys: tuple[Float[Tensor, "B h S d"], ...] = ()
    values: tuple[Float[Tensor, "B h S d"], ...] = ()

    def rows(self, index: slice | Int[Tensor, " R"]) -> "Source":
        return Source(
            self.states[index],
            self.present[index],
            tuple(key[index] for key in self.keys),
            tuple(value[index] for value in self.values),
        )

    def join(self, other: "Source") -> "Source":
        width = max(self.present.shape[1], other.present.shape[1])
        return Source(
            _stacked(self.states, other.states, 1, width),
            _stacked(self.present, other.present, 1, width),
            tuple(_stacked(*pair, 2, width) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(_stacked(*pair, 2, width) for pair in zip(self.values, other.values, strict=True)),
        )

    def as_cross_attention_cache(self) -> TransformersCache:
        """Return the keys and values as the filled cache that transformers expects."""
        return TransformersCache(layers=[_filled(k, v) for k, v in zip(self.keys, self.values, strict=True)])


def _filled(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _stacked(first: Tensor, second: Tensor, axis: int, width: int) -> Tensor:
    """Stack two tensors by rows, after padding `axis` (source tokens) with zeros to `width`."""

    def widened(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[axis] = width - shape[axis]
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)

    return torch.cat([widened(first), widened(second)])


def _padded_batch(sources: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Return the sources padded on the right, and which tokens are not padding."""
    lengths = [len(source) for source in sources]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"sources have lengths {lengths}: give one for each row, of at least one token")
    present = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.zeros(present.shape, dtype=torch.long)
    tokens[present] = torch.tensor([token for source in sources for token in source])
    return tokens, present
