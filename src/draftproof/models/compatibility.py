"""Does a model give through our cache what it gives alone? Asked of families that our tests do not cover."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftproof.core.types import ROOT, InexactError
from draftproof.models.interface import Model

SHORTENABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""The states that a slot cache can hold: one key and one value for each token."""

BY_SLOT = {
    "gpt_neo": "its local layers cut their window by slot, the same for all rows",
    "mpt": "its ALiBi counts slots, which in a tree are not positions",
}
"""Families that a probe of a few tokens, or in half precision, might let through."""


def refuse_at_the_door(model: PreTrainedModel) -> None:
    """Raise where the model could not be served exactly, or could only be served by changing it."""
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout changes the distribution: call model.eval() first")
    if model.config.model_type in BY_SLOT:
        raise InexactError(f"{name} cannot be served in ragged batches and trees: {BY_SLOT[model.config.model_type]}")
    for index, layer in enumerate(DynamicCache(config=decoder_config(model)).layers):
        if type(layer) not in SHORTENABLE:
            raise InexactError(
                f"{name} cannot go back after a rejection: layer {index} keeps a {type(layer).__name__}, a state that "
                "cannot be shortened. Use a model with attention in every layer, or transformers' own generate"
            )
    if getattr(model, "_is_stateful", False):
        raise InexactError(
            f"{name} cannot go back after a rejection: transformers marks its state ({model.config.model_type}) as "
            "recurrent. Use a model with attention in every layer, or transformers' own generate"
        )


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def head_size(model: PreTrainedModel) -> int:
    """Logits in a row, which may be more than the tokenizer has tokens."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    return int(decoder_config(model).vocab_size if size is None else size)


def cached_layers(config: PreTrainedConfig) -> int:
    """Layers with keys and values of their own; some models share them between layers."""
    return len(DynamicCache(config=config).layers)


def furthest(config: PreTrainedConfig) -> int | None:
    """How many positions the model was made for.

    LongRoPE changes all its frequencies at its original length. A cache that was filled before and read after would
    mix both, and a padded pass could cross the border early: it is served up to there.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
    known = [limit for limit in limits if limit is not None and limit > 0]
    return min(known) if known else None


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One set of parameters, or one for each kind of layer."""
    yield parameters
    yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))


def check_pass(tokens: Tensor, parents: Tensor | None, scored: int | None, rows: int) -> None:
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
    for layer in layers:
        if not 1 <= layer <= total:
            raise ValueError(f"layers={tuple(layers)}: the model has layers 1 to {total}, there is no {layer}")


TRIED = frozenset(
    [
        *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama"),
        *("mistral", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "starcoder2"),
    ]
)
"""Model types that tests/models/test_hf.py holds to a plain forward."""

LONG, SHORT = 7, 3
"""Two rows of different lengths: the least that shows positions or masks which are not counted for each row."""

TREE = [ROOT, ROOT, 1]
"""Two siblings, and a child of the second, which must not see the first."""


def probe(served: Model, alone: PreTrainedModel) -> None:
    """Compare a ragged pass and a tree with plain passes, and refuse the model where they differ beyond rounding."""
    tokens = torch.arange(LONG + SHORT + len(TREE), device=served.device) * 31 % served.vocab_size
    long, short, slots = tokens.split([LONG, SHORT, len(TREE)])
    name = type(alone).__name__
    try:
        through = _through(served, long, short, slots)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InexactError(f"{name} cannot be served: it does not take masks and a cache of ours ({reason})") from error
    texts = [text for row in (long, short) for text in (row, torch.cat([row, slots[1:]]))]
    with torch.no_grad():
        plain = torch.stack([alone(text[None], use_cache=False).logits[0, -1] for text in texts])
    off = float((through - plain).abs().max() / plain.std())
    # Half precision rounds far coarser than float32; a wrong mask or position shows as a tenth of the spread or more.
    if not off <= (1e-3 if plain.dtype == torch.float32 else 5e-2):
        raise InexactError(
            f"{name} gives other logits in a ragged batch or a tree than alone: they differ by {off:.1e} of their "
            "spread. Its positions or masks are not counted for each row, so it cannot be served exactly"
        )


def _through(
    served: Model, long: Int[Tensor, " L"], short: Int[Tensor, " S"], slots: Int[Tensor, " K"]
) -> Float[Tensor, "texts V"]:
    """Logits after each row and after each row with the last branch of the tree: all but the last token first, side
    by side, then the last one as the root of the tree."""
    cache = served.new_cache(2)
    served(torch.stack([long[:-1], torch.cat([short[:-1], long[: LONG - SHORT]])]), cache)
    cache.keep(torch.tensor([LONG - 1, SHORT - 1]))
    tokens = torch.stack([torch.cat([row[-1:], slots]) for row in (long, short)])
    parents = torch.tensor([TREE, TREE], device=served.device)
    return served(tokens, cache, parents=parents).logits[:, [0, -1]].flatten(0, 1)
