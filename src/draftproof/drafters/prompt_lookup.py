"""Copy the tokens that followed the last occurrence of the text's end: the longest match, then the most recent one.

Prompt lookup decoding (Saxena 2023). transformers and vLLM search the whole text in every round. Here every run of
tokens is indexed once, when it is read, so a proposal costs a few dict look-ups whatever the length of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, check_count, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.memory import Memory


class PromptLookup:
    """Drafter that copies after the longest match of the last `longest` tokens, or fewer, down to `shortest`."""

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        check_count("shortest", shortest, 1)
        check_count("longest", longest, shortest)
        self._sizes = range(longest, shortest - 1, -1)
        self._memory: Memory[RunIndex] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] chosen tokens for each row; see `Drafter`."""
        self._memory.forget(contexts)
        guesses = []
        for context, most in zip(contexts, k, strict=True):
            index = self._memory.of(context, RunIndex)
            self._update(index, context.tokens)
            tokens = _copy(context.tokens, self._match(index, context.tokens), most)
            guesses.append(Guess(tokens, list(range(-1, len(tokens) - 1))))
        return chosen(guesses, rng.seeds.device)

    def _update(self, index: "RunIndex", tokens: Sequence[int]) -> None:
        """Index the runs that end before each new token."""
        for i in range(max(index.read, 1), len(tokens)):
            end = tuple(tokens[max(0, i - self._sizes[0]) : i])
            for size in self._sizes:
                if size <= len(end):
                    index.after[end[len(end) - size :]] = i
        index.read = len(tokens)

    def _match(self, index: "RunIndex", tokens: Sequence[int]) -> int:
        """Return the position after the best match, or the length of the text if there is none."""
        end = tuple(tokens[-self._sizes[0] :])
        for size in self._sizes:
            if size <= len(end) and (at := index.after.get(end[len(end) - size :])) is not None:
                return at
        return len(tokens)


@dataclass(slots=True)
class RunIndex:
    """For every run of a text, the position after its latest occurrence.

    The run at the very end is not indexed yet, because nothing has followed it. `read` counts the tokens indexed.
    """

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0


def _copy(tokens: Sequence[int], start: int, most: int) -> list[int]:
    """Copy up to `most` tokens from `start` on; a copy that reaches the end of the text repeats itself."""
    piece = list(tokens[start : start + most])
    if not piece:
        return []
    while len(piece) < most:
        piece += piece[: most - len(piece)]
    return piece
