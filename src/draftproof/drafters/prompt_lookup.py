"""Copy what followed the last tokens where they stood before: the longest match, the most recent one.

Prompt lookup decoding (Saxena 2023). Where transformers and vLLM search the text in every round, every run is filed
here once, when it is read: a proposal costs a few look-ups, however long the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, check_count, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.memory import Memory


@dataclass(slots=True)
class Filed:
    """For every run of the text the index behind its latest occurrence. The run at the very end is not filed yet:
    nothing has followed it."""

    behind: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0


class PromptLookup:
    """Drafts by the longest match: of the last `longest` tokens, else of fewer, down to `shortest`."""

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        check_count("shortest", shortest, 1)
        check_count("longest", longest, shortest)
        self._sizes = range(longest, shortest - 1, -1)
        self._memory: Memory[Filed] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] chosen tokens; see `Drafter`."""
        self._memory.forget(contexts)
        guesses = []
        for context, most in zip(contexts, k, strict=True):
            filed = self._memory.of(context, Filed)
            self._file(filed, context.tokens)
            tokens = _copied(context.tokens, self._match(filed, context.tokens), most)
            guesses.append(Guess(tokens, list(range(-1, len(tokens) - 1))))
        return chosen(guesses, rng.seeds.device)

    def _file(self, filed: Filed, tokens: Sequence[int]) -> None:
        for i in range(max(filed.read, 1), len(tokens)):
            end = tuple(tokens[max(0, i - self._sizes[0]) : i])
            for size in self._sizes:
                if size <= len(end):
                    filed.behind[end[len(end) - size :]] = i
        filed.read = len(tokens)

    def _match(self, filed: Filed, tokens: Sequence[int]) -> int:
        """The index behind the match; the text's length where there is none."""
        end = tuple(tokens[-self._sizes[0] :])
        for size in self._sizes:
            if size <= len(end) and (at := filed.behind.get(end[len(end) - size :])) is not None:
                return at
        return len(tokens)


def _copied(tokens: Sequence[int], start: int, most: int) -> list[int]:
    """Up to `most` tokens from `start` on. A match that runs into the end of the text is a repetition, and goes on."""
    piece = list(tokens[start : start + most])
    if not piece:
        return []
    while len(piece) < most:
        piece += piece[: most - len(piece)]
    return piece
