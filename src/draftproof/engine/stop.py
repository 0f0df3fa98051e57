"""End texts: cut a round's tokens at an end-of-text token, a stop string or the budget, and hold back streamed text
that may be the beginning of a stop string.

The cut comes after verification and never changes it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from draftproof.models.tokenizer import Detokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TextStream:
    """An incremental decoder that ends at a stop string and holds back text that may be the beginning of one.

    The text ends before the first stop string to be complete (of two that end together, before the longer). This
    depends on the characters only, not on how they fall into tokens, or tokens into rounds. `consumed` counts the
    tokens up to and including the one that completed the stop string; tokens fed after it are ignored. A stop string
    that begins within the first `min_tokens` tokens is not one.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: str | Sequence[str] | None = None, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer, self._min_tokens = detokenizer, min_tokens
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        if "" in self._stops:
            raise ValueError(f"stop={stop!r} contains an empty string, which would end every text at once; remove it")
        self._held = ""
        self.consumed = 0
        self.stopped: str | None = None
        """The stop string that ended the text; None so far."""

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the text that these tokens make safe to show."""
        pieces = []
        for token in tokens:
            if self.stopped is not None:
                break
            self.consumed += 1
            pieces.append(self._safe_part(self._detokenizer.push(token)))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the rest of the text after the last token. A stop string may still be found in it."""
        if self.stopped is not None:
            return ""
        piece = self._safe_part(self._detokenizer.flush())
        held, self._held = self._held, ""
        return piece + held

    def _safe_part(self, piece: str) -> str:
        if self.consumed <= self._min_tokens:
            return piece
        text = self._held + piece
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end - len(self.stopped)]
        safe = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]


def overlap(text: str, mark: str) -> int:
    """Count the characters at the end of `text` that are the beginning of `mark`, and not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def cut(
    tokens: Sequence[int],
    room: int,
    eos: Collection[int],
    stream: TextStream | None,
) -> tuple[list[int], str, FinishReason | None]:
    """Return the tokens that the request keeps, the text that is safe to show, and why it ends; None: it continues.

    A round's tokens have the target's distribution, and dropping the end changes nothing before it. `room` is how many
    tokens may still be emitted.
    """
    reason: FinishReason | None = None
    kept = list(tokens[:room])
    end = next((i for i, token in enumerate(kept) if token in eos), None)
    if end is not None:
        kept, reason = kept[: end + 1], "stop"
    elif len(kept) == room:
        reason = "length"
    if stream is None:
        return kept, "", reason
    before = stream.consumed
    text = stream.feed(kept)
    if stream.stopped is None and reason is not None:
        text += stream.flush()
    if stream.stopped is not None:
        kept, reason = kept[: stream.consumed - before], "stop"
    return kept, text, reason
