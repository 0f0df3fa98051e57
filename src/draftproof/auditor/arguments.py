"""Check the arguments of `audit` before anything is computed: a wrong one must not look like a biased decoder."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, Final

from draftproof.auditor.interface import Decoder
from draftproof.core.sampling import SamplingParams

METHODS: Final = ("auto", "joint", "bets", "greedy")

SEEDS: Final = (-(2**63), 2**62)
"""First seed and end of the range: seeds have 64 bits, and text i adds i to the first one."""

ENCODE: Final = (
    'encode text with the target\'s tokenizer: tokenizer(text)["input_ids"], or for a chat '
    'tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]'
)


def check_objects(decoder: object, sampling: object, method: object, watch: object) -> None:
    """Refuse an object without `decode`, other sampling parameters than ours, an unknown method, or no function."""
    if not isinstance(decoder, Decoder):
        raise ValueError(
            "decoder must have a method decode(prompts, sampling, *, max_tokens, seeds), such as an Engine or one of "
            f"draftproof.auditor.decoders; got {_shown(decoder)}"
        )
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams, as in dp.SamplingParams(top_k=50); got {_shown(sampling)}")
    check_name("method", method, METHODS)
    if watch is not None and not callable(watch):
        raise ValueError(f"watch must be a function of a certificate, or None; got {_shown(watch)}")


def check_name(argument: str, value: object, known: Sequence[str]) -> None:
    """Refuse a value that is not one of the known names, and suggest the closest."""
    if isinstance(value, str) and value in known:
        return
    close = get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}; got {_shown(value)}{hint}")


def open_share(name: str, value: object) -> float:
    """Return a number between 0 and 1, both excluded."""
    number = _real(value)
    if number is None or not 0 < number < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, both excluded; got {_shown(value)}")
    return number


def tolerance_or_none(value: object) -> float | None:
    """Return a tolerance: a finite number ≥ 0, or None."""
    number = _real(value)
    if value is not None and (number is None or not 0 <= number < math.inf):
        raise ValueError(
            "tolerance must be a finite number ≥ 0, the relative error of a probability that rounding may cause, or "
            f"None for the one of the target's dtype; got {_shown(value)}"
        )
    return number


def count_or_none(name: str, value: object) -> int | None:
    """Return a whole number ≥ 1, or None."""
    number = _whole(value)
    if value is not None and (number is None or number < 1):
        raise ValueError(f"{name} must be ≥ 1, a whole number, or None for the default; got {_shown(value)}")
    return number


def first_seed(value: object) -> int:
    """Return a seed, with room for the numbers of the texts that are added to it."""
    number = _whole(value)
    if number is None or not SEEDS[0] <= number < SEEDS[1]:
        raise ValueError(f"seed must be a whole number from -2**63 to 2**62 - 1; got {_shown(value)}")
    return number


def end_tokens(value: object) -> tuple[int, ...] | None:
    """Return end-of-text tokens, or None."""
    if value is None:
        return None
    ids = tuple(map(_whole, value)) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    known = tuple(i for i in ids if i is not None and i >= 0)
    if len(known) < len(ids):
        raise ValueError(f"ends must be token ids ≥ 0, as in (2,), () for none, or None; got {_shown(value)}")
    return known


def token_ids(prompts: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the prompts as tuples of token ids of the target's vocabulary."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, (str, bytes, Mapping)):
        raise ValueError(f"prompts must be lists of token ids; got {_shown(prompts)}: {ENCODE}")
    rows = tuple(_prompt(i, prompt, vocab_size) for i, prompt in enumerate(prompts))
    if not rows:
        raise ValueError("prompts must be lists of token ids, at least one; got none")
    return rows


def _prompt(i: int, prompt: object, vocab_size: int) -> tuple[int, ...]:
    if _whole(prompt) is not None and not getattr(prompt, "ndim", 0):  # a tensor of one token is a prompt
        raise ValueError(f"prompts must be lists of token ids; prompt {i} is the number {prompt}: write [[1, 2, 3]]")
    if not isinstance(prompt, Iterable) or isinstance(prompt, (str, bytes, Mapping)):
        raise ValueError(f"prompts must be lists of token ids; prompt {i} is {_shown(prompt)}: {ENCODE}")
    ids = [(token, _whole(token)) for token in prompt]
    if not ids:
        raise ValueError(f"prompts must be lists of token ids, none of them empty; prompt {i} is empty")
    for place, (token, number) in enumerate(ids):
        if number is None:
            raise ValueError(f"prompts must be lists of token ids; prompt {i} has {_shown(token)} at {place}: {ENCODE}")
        if not 0 <= number < vocab_size:
            raise ValueError(
                f"prompt {i} has token {number} at {place}: the target's vocabulary has the ids 0 to {vocab_size - 1}"
            )
    return tuple(number for _, number in ids if number is not None)


def check_biased_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse a logit bias of tokens that the target does not have."""
    unknown = [token for token in sampling.logit_bias if token >= vocab_size]
    if unknown:
        raise ValueError(
            f"sampling.logit_bias has token {unknown[0]}: the target's vocabulary has the ids 0 to {vocab_size - 1}"
        )


def _real(value: object) -> float | None:
    """Return a real number as a float, numpy's too; None for anything else and for NaN."""
    if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(value):
        return None
    return float(value)


def _whole(value: Any) -> int | None:
    """Return a whole number as an int, numpy's and torch's too; None for anything else, such as 5.0 and True."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch: a tensor of several or of floats
        return None


def _shown(value: object) -> str:
    """Show a value in an error message, shortened."""
    return f"{value!r:.80}" if isinstance(value, (str, int, float)) else f"{value!r:.80} ({type(value).__name__})"
