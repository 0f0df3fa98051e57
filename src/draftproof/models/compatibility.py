"""Does a model give through our cache what it gives alone? Asked of families that our tests do not cover."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.types import ROOT, InexactError
from draftproof.models.interface import Model

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
