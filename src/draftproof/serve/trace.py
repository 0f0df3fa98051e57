"""Say where every token of a stream came from: an accepted draft token, the residual, the bonus, or plain decoding."""

from collections import deque
from typing import Any, Literal

from draftproof.engine.request import Chunk
from draftproof.models.tokenizer import Detokenizer, Tokenizer

Origin = Literal["draft", "residual", "bonus", "plain"]


class Trace:
    """The origins of one text's tokens. The parts of all chunks together spell exactly the streamed text.

    In a tree the draft tokens of other branches count as not accepted, so that the last token of a round is a
    "residual" even after a whole branch.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer, after=prompt)
        self._pending: deque[tuple[str, Origin]] = deque()
        """Parts of tokens whose text is held back: it may be the beginning of a stop string."""

    def parts(self, chunk: Chunk) -> dict[str, Any]:
        """Return what a chunk's text consists of, and how well drafting works so far."""
        drafted, accepted = chunk.stats.last_round or (0, 0)
        last: Origin = "plain" if drafted == 0 else "bonus" if accepted == drafted else "residual"
        origin: Origin = last
        for place, token in enumerate(chunk.tokens):
            origin = "draft" if place < accepted else last
            self._pending.append((self._detokenizer.push(token), origin))
        if chunk.finish_reason is not None:
            self._pending.append((self._detokenizer.flush(), origin))
        parts = [{"text": text, "from": origin} for text, origin in self._take(len(chunk.text))]
        return {
            "tokens": parts,
            "tokens_per_pass": chunk.stats.tokens_per_pass,
            "acceptance": chunk.stats.acceptance_rate,
        }

    def _take(self, length: int) -> list[tuple[str, Origin]]:
        """Take so many characters of what is pending."""
        taken = []
        while length > 0 and self._pending:
            text, origin = self._pending.popleft()
            if len(text) > length:
                self._pending.appendleft((text[length:], origin))
            if text:
                taken.append((text[:length], origin))
            length -= len(text)
        return taken
