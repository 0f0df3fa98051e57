"""Run a few tokens through a model that the tests do not cover, and refuse it if it cannot be served exactly.

Two properties are measured. Causality: later tokens must not change earlier logits, or a draft would change the
distribution of the tokens before it; quantisation that decides over a whole pass (LLM.int8's outlier columns, one
activation scale for all tokens) breaks it. Equality: a ragged batch and a tree over the slot cache must give the logits
of a plain forward.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.types import ROOT, InexactError
from draftproof.models.compatibility import TESTED_FAMILIES, decoder_config, has_foreign_code, is_quantized
from draftproof.models.interface import Cache, Model

Result = TypeVar("Result")

PROBE_LONG, PROBE_SHORT = 7, 3
"""Tokens in the two rows of a probe. Lengths must differ to reveal positions or masks not computed for each row."""

PROBE_TREE = [ROOT, ROOT, 1]
"""Parents in the tree of a probe: two siblings, and a child of the second, which must not see the first."""

ROLLBACKS: Final = (
    (6, (6, 2)),
    (4, (4, 4)),
    (1, (1, 0)),
    (1, (0, 1)),
    (5, (0, 3)),
    (5, (4, 1)),
    (3, (1, 3)),
    (3, (1, 3)),
)
"""Passes of a probe of recurrent states: tokens in each row, and how many of them each row keeps, as many in all."""

FINE_MADE_UP_LIMIT: Final = 3e-3
"""Largest mean difference of logits and states from made-up states, in standard deviations, that passes for rounding in
float32. Rounding in deep models is chaotic there, and an ignored state is wrong everywhere: hence a mean. In served
families it was at most 9e-5, also with 24 layers, and in those that ignore their state at least 0.1."""

COARSE_MADE_UP_LIMIT: Final = 5e-2
"""Largest mean difference from made-up states that passes for rounding in half precision. In bfloat16 it was at most
8e-3 in served families with usual weights. Random weights that are 15 times as wide gave up to 0.14, and are refused in
two families."""

LONGEST_CROSSED: Final = 512
"""Tokens of the longest attention window that a probe crosses; longer rows would cost seconds on a CPU."""

CAUSAL_TOKENS: Final = 48
"""Tokens in a test of causality: the first third stays, the rest changes. With so many, LLM.int8 (bitsandbytes) moved
the logits of SmolLM2-135M in 20 of 20 tests, by 13 % to 55 % of their spread; 4-bit weights moved them by exactly 0."""

CAUSAL_VARIANTS: Final = 3
"""Texts compared in a test of causality."""

FINE_LIMIT: Final = 1e-3
"""Largest difference of logits, in standard deviations, that passes for rounding in float32."""

COARSE_LIMIT: Final = 0.3
"""Largest difference, in standard deviations, that passes in half precision or with quantisation. bfloat16 rounding
moved the logits of SmolLM2-135M by up to 0.2, and a mask with one token too many by 3 or more."""

QUANTIZED_CAUSAL_LIMIT: Final = 1e-2
"""Largest effect of a later token, in standard deviations, that passes in a quantised model. Texts of one shape round
alike, so that most models differ by 0."""


def needs_probe(model: PreTrainedModel, *, drafter: bool = False) -> bool:
    """Return whether a model must be probed before it is served.

    A drafter may compute its distribution in any way, as long as it draws from it, so for a drafter only a family that
    the tests do not cover counts: wrong masks would make it slow.
    """
    return not _is_tested(model) or (not drafter and (has_foreign_code(model) or is_quantized(model)))


def probe(
    served: Model, original: PreTrainedModel, windows: Mapping[str, int | None], *, drafter: bool = False
) -> None:
    """Refuse a model whose logits depend on later tokens, or differ in a ragged batch or a tree from a plain forward.

    Rows are longer than an attention window of at most LONGEST_CROSSED tokens; a longer one is named in a warning.
    """
    if not drafter:
        probe_causality(served, original, served.new_cache)
    long = _row_length(served, original, windows)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(served.vocab_size, (long + PROBE_SHORT + len(PROBE_TREE),), generator=generator)
    rows = tokens.to(served.device).split([long, PROBE_SHORT, len(PROBE_TREE)])
    logits = attempt(original, lambda: _served_logits(served, *rows))
    texts = [text for row in rows[:2] for text in (row, torch.cat([row, rows[2][1:]]))]
    with torch.no_grad():
        plain = torch.stack([original(text[None], use_cache=False, logits_to_keep=1).logits[0, -1] for text in texts])
    off = float((logits - plain).abs().max() / plain.std())
    if not off <= _rounding_limit(original):
        raise InexactError(
            f"{type(original).__name__} gives other logits in a ragged batch or a tree than alone: they differ by "
            f"{off:.1e} of their standard deviation. Its positions or masks are not computed for each row, so it "
            "cannot be served exactly"
        )


def probe_causality(served: Model, original: PreTrainedModel, new_cache: Callable[[int], Cache]) -> None:
    """Refuse a model in which a later token moves earlier logits beyond rounding."""
    T = min(CAUSAL_TOKENS, served.max_length or CAUSAL_TOKENS)
    same = T // 3
    if same == 0:
        return  # one or two positions: nothing is drafted
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(served.vocab_size, (CAUSAL_VARIANTS, T), generator=generator).to(served.device)
    texts[:, :same] = texts[0, :same]
    # One at a time: quantisation may decide over the rows of a batch, too.
    logits = attempt(
        original, lambda: torch.stack([served(text[None], new_cache(1)).logits[0, :same] for text in texts]).float()
    )
    off = float((logits - logits[0]).abs().max() / logits[0].std())
    if not off <= (QUANTIZED_CAUSAL_LIMIT if is_quantized(original) else _rounding_limit(original)):
        raise InexactError(
            f"{type(original).__name__} is not causal: a later token moves earlier logits by {100 * off:.1f} % of "
            f"their spread, so a draft would change the distribution of the text. {_advice(original)}"
        )


def probe_recurrence(
    served: Model,
    original: PreTrainedModel,
    new_caches: Sequence[Callable[[int], Cache]],
    made_up: Callable[[int], Cache],
    states_of: Callable[[Cache], Sequence[Tensor]],
) -> None:
    """Refuse a model with recurrent states if its logits or states depend on how a text is cut into passes.

    Two rows take passes over one token and over several, of which they keep all, some or none. They must give the
    logits of a plain forward. The same passes from made-up states must give the logits and states of passes over one
    token: after few tokens of a model with small weights, a state that is ignored would pass for rounding.

    new_caches  return a cache of so many empty rows, one for each kind of cache that is used
    made_up     returns a cache of so many empty rows with large recurrent states, always the same
    states_of   returns a cache's recurrent states after the tokens that were kept
    """
    generator = torch.Generator().manual_seed(0)
    B, T = len(ROLLBACKS[0][1]), sum(width for width, _ in ROLLBACKS)
    tokens = torch.randint(served.vocab_size, (B, T), generator=generator).to(served.device)

    def differences() -> tuple[float, float]:
        found = [_with_rollbacks(served, new_cache(B), tokens) for new_cache in new_caches]
        texts = found[0][1]
        with torch.no_grad():
            plain = original(texts, use_cache=False).logits
        rolled, stepped = made_up(B), made_up(B)
        several, one = _with_rollbacks(served, rolled, tokens)[0], _token_by_token(served, stepped, texts)
        pairs = [(several, one), *zip(states_of(rolled), states_of(stepped), strict=True)]
        return (
            max(_largest_deviation(logits, plain) for logits, _ in found),
            max(_mean_deviation(*pair) for pair in pairs),
        )

    off, made_up_off = attempt(original, differences)
    limit = _rounding_limit(original)
    made_up_limit = FINE_MADE_UP_LIMIT if limit == FINE_LIMIT else COARSE_MADE_UP_LIMIT
    if not (off <= limit and made_up_off <= made_up_limit):
        raise InexactError(
            f"{type(original).__name__} cannot roll back after a rejection: cut into other passes, a text's logits "
            f"differ by {off:.1e} of their standard deviation, or by {made_up_off:.1e} from made-up recurrent states. "
            "Its passes over several tokens ignore the recurrent state, or use it in another way than passes over one. "
            "Use a model with attention in every layer, or transformers' own generate"
        )


def _with_rollbacks(
    served: Model, cache: Cache, tokens: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B kept V"], Int[Tensor, "B kept"]]:
    """Take the passes of ROLLBACKS; return the logits of the tokens that were kept, and these tokens."""
    logits: list[list[Tensor]] = [[] for _ in tokens]
    texts: list[list[Tensor]] = [[] for _ in tokens]
    for width, counts in ROLLBACKS:
        these, tokens = tokens[:, :width], tokens[:, width:]
        scored = served(these, cache).logits
        cache.keep(torch.tensor(counts))
        for b, n in enumerate(counts):
            logits[b].append(scored[b, :n])
            texts[b].append(these[b, :n])
    return torch.stack([torch.cat(row) for row in logits]), torch.stack([torch.cat(row) for row in texts])


def _token_by_token(served: Model, cache: Cache, texts: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
    """Return the logits of passes over one token each."""
    logits = []
    for tokens in texts.split(1, 1):
        logits.append(served(tokens, cache).logits)
        cache.keep(torch.ones(len(texts), dtype=torch.long))
    return torch.cat(logits, 1)


def _largest_deviation(found: Tensor, right: Tensor) -> float:
    """Return the largest difference in standard deviations; NaN counts as infinite."""
    return _finite((found.float() - right.float()).abs().max() / right.float().std().clamp_min(1e-30))


def _mean_deviation(found: Tensor, right: Tensor) -> float:
    """Return the root of the mean squared difference in standard deviations; NaN counts as infinite."""
    return _finite((found.float() - right.float()).square().mean().sqrt() / right.float().std().clamp_min(1e-30))


def _finite(deviation: Tensor) -> float:
    return math.inf if bool(deviation.isnan()) else float(deviation)


def _advice(original: PreTrainedModel) -> str:
    if not is_quantized(original):
        return "Use transformers' own generate"
    return (
        "Its quantisation decides over all tokens of a pass: load it in bfloat16, or with quantised weights and "
        "unquantised activations (bitsandbytes: load_in_4bit instead of load_in_8bit)"
    )


def _row_length(served: Model, original: PreTrainedModel, windows: Mapping[str, int | None]) -> int:
    """Return the tokens in the long row: enough to cross every attention window that is short enough."""
    name, length = type(original).__name__, PROBE_LONG
    limit = served.max_length
    for window in sorted(size for size in windows.values() if size):
        if limit is not None and window >= limit - PROBE_LONG - len(PROBE_TREE):
            continue  # the model ends at the window or just after it
        if window <= LONGEST_CROSSED:
            length = window + PROBE_LONG
        elif not _is_tested(original):
            warnings.warn(
                f"{name} was compared with a plain forward on {length} tokens only, within its attention window of "
                f"{window}: longer texts are not checked",
                stacklevel=2,
            )
    return length


def _served_logits(
    served: Model, long: Int[Tensor, " L"], short: Int[Tensor, " S"], slots: Int[Tensor, " K"]
) -> Float[Tensor, "texts V"]:
    """Return the logits after each row, and after each row followed by the last branch of the tree.

    The first pass caches all but the last token of both rows; the second scores the last token as the root of a tree.
    """
    cache = served.new_cache(2)
    padded = torch.cat([short[:-1], long[: len(long) - len(short)]])
    served(torch.stack([long[:-1], padded]), cache, scored=1)
    cache.keep(torch.tensor([len(long) - 1, len(short) - 1]))
    tokens = torch.stack([torch.cat([row[-1:], slots]) for row in (long, short)])
    parents = torch.tensor([PROBE_TREE, PROBE_TREE], device=served.device)
    return served(tokens, cache, parents=parents).logits[:, [0, -1]].flatten(0, 1)


def attempt(original: PreTrainedModel, run: Callable[[], Result]) -> Result:
    """Return the result of a pass; a model that does not accept our masks or cache may raise anything."""
    try:
        return run()
    except InexactError:
        raise
    except Exception as error:
        raise InexactError(
            f"{type(original).__name__} cannot be served: it does not accept our masks and cache "
            f"({type(error).__name__}: {error})"
        ) from error


def _rounding_limit(original: PreTrainedModel) -> float:
    """Return the largest difference of logits, in standard deviations, that passes for rounding."""
    fine = original.dtype in (torch.float32, torch.float64) and not is_quantized(original)
    return FINE_LIMIT if fine else COARSE_LIMIT


def _is_tested(model: PreTrainedModel) -> bool:
    return decoder_config(model).model_type in TESTED_FAMILIES
