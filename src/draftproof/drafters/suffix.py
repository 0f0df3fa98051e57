"""Guess by the longest end of the text that stood anywhere before: in the session, earlier outputs or a corpus.

After suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), on a suffix automaton. A long match is seldom chance: the
draft is as long as the match deserves; of several continuations the most frequent is taken, then the latest. A token
that nothing matches is taken to stand in another's place, as after an edit: the guess goes on behind the one that was
to be expected there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from draftproof.core.noise import Noise
from draftproof.core.types import Draft
from draftproof.drafters import Context
from draftproof.drafters.automaton import BREAK, Automaton, Match
from draftproof.drafters.guess import BACK_OFF, Follower, Guess, check_count, check_share, chosen, grow
from draftproof.drafters.memory import Memory, Strangers

TAIL: Final = 32
"""Tokens of a text that are looked for in earlier outputs and in the corpus."""

KEPT: Final = 2**16
"""Tokens of earlier outputs in a generation. Two are kept, and a token costs some 500 bytes."""


@dataclass(slots=True)
class Reading:
    """A request's own automaton, where else it may look, and the output it will leave behind."""

    sees_earlier: bool
    text: Automaton = field(default_factory=Automaton)
    output: list[int] = field(default_factory=list)


class Suffix:
    """Drafts by the longest match.

    least     where a path seems less likely than this it ends: 1/5 gives a match of L tokens a draft of up to 4 L
    keep      look into the outputs of earlier requests, the oldest forgotten first; who has the seed of one does not
    corpus    texts to look into besides, as token ids (`read_corpus` reads a file of them)
    branches  continuations of a node; more than one makes a tree, for rule="tree"
    """

    def __init__(
        self,
        *,
        least: float = 0.2,
        keep: bool = False,
        corpus: Iterable[Sequence[int]] = (),
        branches: int = 1,
    ) -> None:
        check_count("branches", branches, 1)
        check_share("least", least)
        self._least, self._branches = least, branches
        self._corpus = Automaton.of(corpus)
        self._earlier = [Automaton(), Automaton()] if keep else []
        self._strangers = Strangers()
        self._memory: Memory[Reading] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], noise: Noise) -> Draft:
        """Up to k[b] chosen tokens; see `Drafter`."""
        for gone in self._memory.forget(contexts):
            self._leave(gone)
        guesses = []
        for b, context in enumerate(contexts):
            reading = self._memory.of(context, partial(self._begin, noise, b))
            self._catch_up(reading, context)
            guesses.append(self._guess(reading, context.tokens, k[b]))
        return chosen(guesses, noise.seeds.device, tree=self._branches > 1)

    def _begin(self, noise: Noise, b: int) -> Reading:
        return Reading(bool(self._earlier) and self._strangers.admit(int(noise.seeds[b])))

    def _catch_up(self, reading: Reading, context: Context) -> None:
        read = reading.text.size
        reading.text.read(context.tokens[read:])
        if self._earlier:
            reading.output += context.tokens[max(read, context.prompt_length) :]

    def _leave(self, reading: Reading) -> None:
        if not self._earlier or not reading.output:
            return
        if self._earlier[0].size > KEPT:
            self._earlier = [Automaton(), self._earlier[0]]
        self._earlier[0].read(reading.output)
        self._earlier[0].append(BREAK)

    def _guess(self, reading: Reading, tokens: Sequence[int], slots: int) -> Guess:
        source, match = reading.text, reading.text.repeated()
        for other in (*(self._earlier if reading.sees_earlier else ()), self._corpus):
            if other.size and (found := other.match(tokens[-TAIL:])).length > match.length:
                source, match = other, found

        def expand(node: Match) -> list[tuple[Follower, Match]]:
            return source.followers(node, self._branches)

        if match.length == 0:
            return grow(reading.text.replaced(), expand, slots, least=self._least / BACK_OFF)
        return grow(match, expand, slots, least=self._least)


def read_corpus(path: str | Path) -> list[list[int]]:
    """Texts out of a file: one a line, token ids between blanks."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        return [[int(word) for word in line.split()] for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} must hold token ids, one text a line, blanks between ids: {error}") from None
