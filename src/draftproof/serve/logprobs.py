"""Write log-probabilities as OpenAI's chat and text completions do. All are of the raw distribution."""

from collections.abc import Sequence
from typing import Any, Final

from draftproof.engine.request import TokenLogprobs
from draftproof.serve.token_text import TokenTexts

LEAST: Final = -9999.0
"""The log-probability of what cannot happen, as OpenAI writes it: JSON has no infinity."""


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""
    return {
        "content": [
            _token(entry.token, entry.logprob, texts)
            | {"top_logprobs": [_token(token, value, texts) for token, value in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _token(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": finite(value), "bytes": texts.byte_values(token)}


def completion_logprobs(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, *, offset: int = 0, first: int | None = None
) -> dict[str, Any]:
    """Return the `logprobs` of a text completion.

    `offset` is the number of characters before these tokens; `first` is a first token that nothing comes before, so
    that it has no log-probability. The token itself is listed among its alternatives, as OpenAI does.
    """
    tokens = [] if first is None else [texts.text(first)]
    values: list[float | None] = [] if first is None else [None]
    tops: list[dict[str, float] | None] = [] if first is None else [None]
    for entry in entries:
        tokens.append(texts.text(entry.token))
        values.append(finite(entry.logprob))
        tops.append({texts.text(token): finite(value) for token, value in [*entry.top, (entry.token, entry.logprob)]})
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def finite(value: float) -> float:
    return max(value, LEAST)
