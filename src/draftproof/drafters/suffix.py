"""Guess by the longest end of the text that stood anywhere before: in the session, earlier outputs or a corpus.

After suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), on a suffix automaton. A long match is seldom chance: the
draft is as long as the match deserves; of several continuations the most frequent is taken, then the latest. A token
that nothing matches is taken to stand in another's place, as after an edit: the guess goes on behind the one that was
to be expected there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Final, NamedTuple

from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.build import BACK_OFF, Follower, Guess, check_count, check_share, chosen, grow
from draftproof.drafters.interface import Context
from draftproof.drafters.memory import Memory, Strangers

BREAK: Final = -1
"""Stands between two texts; never followed, never proposed."""

TOP: Final = 0
"""The state of the empty run."""

COUNTED: Final = 32
"""Links up which an occurrence is counted. Ordinary text has fewer; a text of one token repeated has as many as
tokens, and counting them all would make reading it quadratic."""


class Match(NamedTuple):
    """A state, and how much of the text before it is known to agree: a state's runs may be longer."""

    state: int
    length: int


class Automaton:
    """States are indices into parallel lists: objects would cost several times the memory."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens read."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._latest = [0]
        self._last = self._previous = TOP
        self._token = BREAK

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> "Automaton":
        """Several texts; runs do not reach from one into the next."""
        made = cls()
        for text in texts:
            made.read(text)
            made.append(BREAK)
        return made

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """One more token of the text: constant time on average."""
        new = self._state({}, -1, self._length[self._last] + 1, 0)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = TOP if state == -1 else self._ending(state, token)
        self._previous, self._last, self._token = self._last, new, token
        self.size += 1
        self._tally(new)

    def repeated(self) -> Match:
        """The longest end of the text that stands in it earlier, too."""
        state = max(self._link[self._last], TOP)
        return Match(state, self._length[state])

    def replaced(self) -> Match:
        """Where the text would stand with another token at its end, the one that was to be expected there."""
        state = max(self._link[self._previous], TOP)
        expected = self.followers(Match(state, self._length[state]), 2)
        others = (match for follower, match in expected if follower.token != self._token)
        return next(others, Match(TOP, 0))

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest end of `tokens` that stands anywhere in the text."""
        state = length = 0
        for token in tokens:
            while state != TOP and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return Match(state, length)

    def followers(self, match: Match, most: int) -> list[tuple[Follower, Match]]:
        """Up to `most` tokens that followed this match, then shorter ends of it, and where they lead.

        By count, then the latest. The longer the match, the surer: one that stood once, L tokens long, gives a path
        of d tokens a share of L / (L + d). The empty run is not asked: what is frequent is no match.
        """
        found: dict[int, tuple[Follower, Match]] = {}
        state, length = match
        trust = 1.0
        while state > TOP and len(found) < most:
            after = self._after(state, most)
            unit = trust / (sum(self._count[to] for to in self._next[state].values()) + 1 / length)
            for token, to in after:
                found.setdefault(token, (Follower(token, self._count[to] * unit), Match(to, length + 1)))
            state = self._link[state]
            length = min(length, self._length[state])
            trust *= BACK_OFF if after else 1.0
        return list(found.values())[:most]

    def _after(self, state: int, most: int) -> list[tuple[int, int]]:
        """The tokens most often seen behind a state, and the states they lead to."""
        ways = ((token, to) for token, to in self._next[state].items() if token != BREAK)
        return nlargest(most, ways, key=lambda way: (self._count[way[1]], self._latest[way[1]]))

    def _ending(self, state: int, token: int) -> int:
        """The state of the run that `state` ends with and then `token`, split off where it shares one with longer
        runs: those do not end here."""
        known = self._next[state][token]
        if self._length[state] + 1 == self._length[known]:
            return known
        split = self._state(dict(self._next[known]), self._link[known], self._length[state] + 1, known)
        self._link[known] = split
        while state != -1 and self._next[state].get(token) == known:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _state(self, following: dict[int, int], link: int, length: int, like: int) -> int:
        """A new state, as often seen as the state `like`."""
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(self._count[like])
        self._latest.append(self._latest[like])
        return len(self._next) - 1

    def _tally(self, state: int) -> None:
        for _ in range(COUNTED):
            if state <= TOP:
                return
            self._count[state] += 1
            self._latest[state] = self.size
            state = self._link[state]


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

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] chosen tokens; see `Drafter`."""
        for gone in self._memory.forget(contexts):
            self._leave(gone)
        guesses = []
        for b, context in enumerate(contexts):
            reading = self._memory.of(context, partial(self._begin, rng, b))
            self._catch_up(reading, context)
            guesses.append(self._guess(reading, context.tokens, k[b]))
        return chosen(guesses, rng.seeds.device, tree=self._branches > 1)

    def _begin(self, rng: Philox, b: int) -> Reading:
        return Reading(bool(self._earlier) and self._strangers.admit(int(rng.seeds[b])))

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
