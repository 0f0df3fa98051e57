"""Decide whether a transformers model can be served exactly, and read its sizes from its configuration.

`refuse_unsupported` checks what is known from the class and the configuration. `probe` runs a few tokens of a family
that the tests do not cover, and compares the slot cache with a plain forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftproof.core.types import ROOT, InexactError
from draftproof.models.interface import Model

TESTED_FAMILIES = frozenset(
    [
        *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama"),
        *("mistral", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "starcoder2"),
    ]
)
"""Model types that tests/models/test_hf.py compares with a plain forward; all others are probed."""

SHORTENABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers of transformers that a slot cache can replace: one key and one value for each token."""

POSITIONS_BY_SLOT = {
    "gpt_neo": "its local layers cut their window by slot, the same for all rows",
    "mpt": "its ALiBi counts slots, which in a tree are not positions",
}
"""Families refused by name, with the reason: a probe of a few tokens, or in half precision, might accept them."""

PROBE_LONG, PROBE_SHORT = 7, 3
"""Tokens in the two rows of a probe. Lengths must differ to reveal positions or masks not computed for each row."""

PROBE_TREE = [ROOT, ROOT, 1]
"""Parents in the tree of a probe: two siblings, and a child of the second, which must not see the first."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise if the model cannot be served exactly, or only after a change to it."""
    name = type(model).__name__
    family = model.config.model_type
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout changes the distribution: call model.eval() first")
    if family in POSITIONS_BY_SLOT:
        raise InexactError(f"{name} cannot be served in ragged batches and trees: {POSITIONS_BY_SLOT[family]}")
    for index, layer in enumerate(DynamicCache(config=decoder_config(model)).layers):
        if type(layer) not in SHORTENABLE:
            raise InexactError(
                f"{name} cannot roll back after a rejection: layer {index} keeps a {type(layer).__name__}, a state "
                "that cannot be shortened. Use a model with attention in every layer, or transformers' own generate"
            )
    if getattr(model, "_is_stateful", False):
        raise InexactError(
            f"{name} cannot roll back after a rejection: transformers marks its state ({family}) as recurrent. "
            "Use a model with attention in every layer, or transformers' own generate"
        )


def probe(served: Model, original: PreTrainedModel) -> None:
    """Compare a ragged pass and a tree with plain passes, and refuse the model if they differ beyond rounding."""
    tokens = torch.arange(PROBE_LONG + PROBE_SHORT + len(PROBE_TREE), device=served.device) * 31 % served.vocab_size
    long, short, slots = tokens.split([PROBE_LONG, PROBE_SHORT, len(PROBE_TREE)])
    name = type(original).__name__
    try:
        logits = _served_logits(served, long, short, slots)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InexactError(f"{name} cannot be served: it does not accept our masks and cache ({reason})") from error
    texts = [text for row in (long, short) for text in (row, torch.cat([row, slots[1:]]))]
    with torch.no_grad():
        plain = torch.stack([original(text[None], use_cache=False).logits[0, -1] for text in texts])
    off = float((logits - plain).abs().max() / plain.std())
    # Half precision rounds far coarser than float32; a wrong mask or position shows as a tenth of the spread or more.
    if not off <= (1e-3 if plain.dtype == torch.float32 else 5e-2):
        raise InexactError(
            f"{name} gives other logits in a ragged batch or a tree than alone: they differ by {off:.1e} of their "
            "standard deviation. Its positions or masks are not computed for each row, so it cannot be served exactly"
        )


def _served_logits(
    served: Model, long: Int[Tensor, " L"], short: Int[Tensor, " S"], slots: Int[Tensor, " K"]
) -> Float[Tensor, "texts V"]:
    """Return the logits after each row, and after each row followed by the last branch of the tree.

    The first pass caches all but the last token of both rows; the second scores the last token as the root of a tree.
    """
    cache = served.new_cache(2)
    served(torch.stack([long[:-1], torch.cat([short[:-1], long[: PROBE_LONG - PROBE_SHORT]])]), cache)
    cache.keep(torch.tensor([PROBE_LONG - 1, PROBE_SHORT - 1]))
    tokens = torch.stack([torch.cat([row[-1:], slots]) for row in (long, short)])
    parents = torch.tensor([PROBE_TREE, PROBE_TREE], device=served.device)
    return served(tokens, cache, parents=parents).logits[:, [0, -1]].flatten(0, 1)


def check_pass(tokens: Tensor, parents: Tensor | None, scored: int | None, rows: int) -> None:
    """Raise if the arguments of a pass do not fit each other, or a cache of this many rows."""
    B, T = tokens.shape
    if rows != B or T == 0:
        raise ValueError(f"tokens {(B, T)} must have {rows} rows, as the cache has, and at least one column")
    if parents is not None and parents.shape != (B, T - 1):
        raise ValueError(
            f"parents {tuple(parents.shape)} must name a parent for each token after the root: {(B, T - 1)}"
        )
    if scored is not None and not 1 <= scored <= T:
        raise ValueError(f"scored={scored}, but the pass has {T} tokens: give 1 to {T}, or None for all")


def check_layers(layers: Sequence[int], total: int) -> None:
    """Raise if hidden states are requested after a layer that the model does not have."""
    for layer in layers:
        if not 1 <= layer <= total:
            raise ValueError(f"layers={tuple(layers)}: the model has layers 1 to {total}, there is no {layer}")


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, also of a model that has other parts."""
    return model.config.get_text_config(decoder=True)


def head_size(model: PreTrainedModel) -> int:
    """Return the number of logits per position, which may exceed the tokenizer's vocabulary."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    return int(decoder_config(model).vocab_size if size is None else size)


def cached_layers(config: PreTrainedConfig) -> int:
    """Count the layers with keys and values of their own; some models share them between layers."""
    return len(DynamicCache(config=config).layers)


def furthest(config: PreTrainedConfig) -> int | None:
    """Return the number of positions the model can be served for; None if there is no limit.

    LongRoPE changes all its frequencies at its original length. A cache that is filled before and read after would mix
    both, and padding could cross that length early, so such a model is served up to there only.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
    known = [limit for limit in limits if limit is not None and limit > 0]
    return min(known) if known else None


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of all layers, or of each kind of layer where kinds differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))
