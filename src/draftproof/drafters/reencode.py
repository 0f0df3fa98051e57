"""Encode a request's text again in a draft model's own vocabulary, as it grows.

The text is divided where a token of the target begins a word. A word whose tokens are all in both vocabularies is taken
over token by token. Any other word is encoded by the draft model's tokenizer, as that model has seen it in training.
Only the last word can change when the text grows: everything before it is settled. Any encoding is exact, because it is
a function of the tokens that were kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

from draftproof.core.sampling import SamplingParams
from draftproof.drafters.interface import Context, TargetOutputs
from draftproof.drafters.memory import Memory
from draftproof.models.token_bytes import TokenBytes
from draftproof.models.vocabulary_overlap import VocabularyOverlap

LONGEST_WORD: Final = 32
"""Tokens after which a word is settled even if no other begins, so that text without spaces is not encoded again in
every round."""

WHITESPACE: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class ReencodedContext:
    """A context in the draft model's tokens. `target_tokens` are the target's, which the penalties count."""

    id: int
    tokens: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    target_tokens: Sequence[int]
    target_outputs: TargetOutputs | None = None


@dataclass(slots=True)
class Encoding:
    """One request's text in the draft model's tokens.

    The last word begins at the target's token `word`, and at `settled` of the ids. `unchanged` counts the ids that are
    the same as before the last update.
    """

    ids: list[int] = field(default_factory=list)
    word: int = 0
    settled: int = 0
    unchanged: int = 0


class Reencoder:
    """Encodes contexts in the draft model's vocabulary, one request after another.

    `name` gives the id under which a draft token is passed on; by default it is the draft model's own.
    """

    def __init__(self, overlap: VocabularyOverlap, name: Callable[[int], int] = int) -> None:
        self._overlap, self._name = overlap, name
        self._memory: Memory[Encoding] = Memory()

    def __call__(
        self, contexts: Sequence[Context], changed: Callable[[int, int], None], sampling: SamplingParams | None = None
    ) -> list[ReencodedContext]:
        """Return the contexts in the draft model's tokens; `changed(id, n)` is told that only n tokens stayed the same.

        `sampling` replaces the requests' own sampling parameters.
        """
        self._memory.forget(contexts)
        return [self._reencoded(context, changed, sampling) for context in contexts]

    def _reencoded(
        self, context: Context, changed: Callable[[int, int], None], sampling: SamplingParams | None
    ) -> ReencodedContext:
        encoding = self._memory.of(context, partial(self._begin, context.tokens))
        before = len(encoding.ids)
        self._update(encoding, context.tokens)
        if encoding.unchanged < before:
            changed(context.id, encoding.unchanged)
        return ReencodedContext(
            context.id, encoding.ids, context.prompt_length, sampling or context.sampling, context.tokens
        )

    def _begin(self, tokens: Sequence[int]) -> Encoding:
        """Start with the tokens that the draft model's texts start with, unless the target's text has its own."""
        opening = self._overlap.draft.opening
        if tokens and opening == [self._overlap.partner.get(tokens[0])]:
            opening = []
        ids = [self._name(token) for token in opening]
        return Encoding(ids, settled=len(ids))

    def _update(self, encoding: Encoding, tokens: Sequence[int]) -> None:
        """Encode again from the last word on."""
        old, new, settled = encoding.ids[encoding.settled :], list[int](), 0
        for first, last in pairwise([*self._word_starts(tokens, encoding.word), len(tokens)]):
            encoding.word, settled = first, len(new)
            new += map(self._name, self._encoded(tokens[first:last]))
        encoding.unchanged = encoding.settled + common_prefix(old, new)
        encoding.ids[encoding.settled :] = new
        encoding.settled += settled

    def _word_starts(self, tokens: Sequence[int], start: int) -> Iterator[int]:
        """Yield the index of each token that begins a word, `start` first."""
        yield start
        for i in range(start + 1, len(tokens)):
            if i - start >= LONGEST_WORD or begins_word(self._overlap.target, tokens[i - 1], tokens[i]):
                start = i
                yield i

    def _encoded(self, word: Sequence[int]) -> list[int]:
        """Return a word in the draft model's tokens. A special token without a partner is spelled out."""
        partner, target, draft = self._overlap.partner, self._overlap.target, self._overlap.draft
        if all(token in partner for token in word):
            return [partner[token] for token in word]
        name = target.special.get(word[0])
        return draft.encode(spelled(target, word) if name is None else name.encode())


def begins_word(vocabulary: TokenBytes, before: int, token: int) -> bool:
    """Tell whether a word begins between two tokens: at white space after other text, or at a special token."""
    if before in vocabulary.special or token in vocabulary.special:
        return True
    text = vocabulary.spelled.get(token, b"")
    return text[:1] in WHITESPACE and vocabulary.spelled.get(before, b"")[-1:] not in WHITESPACE


def spelled(vocabulary: TokenBytes, tokens: Sequence[int]) -> bytes:
    """Return the bytes of these tokens; special and unknown ones have none."""
    return b"".join(vocabulary.spelled.get(token, b"") for token in tokens)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
