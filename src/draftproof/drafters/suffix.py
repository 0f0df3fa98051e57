"""Draft by the longest suffix of the text that occurred before: in the text itself, earlier outputs or a corpus.

After suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), on a suffix automaton. A longer match gets a longer
draft, because it is less likely to be a coincidence. Among several continuations the most frequent is taken, then the
latest. If nothing matches, the last token is assumed to replace another one, as after an edit: the draft continues
after the token that was expected in its place.
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
from draftproof.drafters.memory import Memory, NewSeeds

MAX_MATCH: Final = 32
"""Tokens at the end of a text that are searched for in earlier outputs and in the corpus."""

KEPT_TOKENS: Final = 2**16
"""Tokens of earlier outputs in one generation. Two generations are kept, and a token costs about 500 bytes."""

BREAK: Final = -1
"""Separator between two texts; never matched, never proposed."""

TOP: Final = 0
"""The state of the empty run."""

MAX_COUNTED_LINKS: Final = 32
"""Suffix links along which an occurrence is counted. Ordinary text has fewer. One token repeated n times has n links,
and counting along all of them would take quadratic time."""


class Suffix:
    """Drafter that copies after the longest match.

    least     end a path where its estimated probability falls below this: 1/5 gives a match of L tokens a draft of up
              to 4 L
    keep      also search the outputs of earlier requests, of which the oldest are dropped first. A request with the
              seed of an earlier one does not search them
    corpus    further texts to search, as token ids (`read_corpus` reads them from a file)
    branches  children per node; more than one makes a tree, for rule="tree"
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
        self._seeds = NewSeeds()
        self._memory: Memory[RequestText] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] chosen tokens for each row; see `Drafter`."""
        for gone in self._memory.forget(contexts):
            self._keep_output(gone)
        guesses = []
        for b, context in enumerate(contexts):
            request = self._memory.of(context, partial(self._begin, rng, b))
            self._catch_up(request, context)
            guesses.append(self._guess(request, context.tokens, k[b]))
        return chosen(guesses, rng.seeds.device, tree=self._branches > 1)

    def _begin(self, rng: Philox, b: int) -> "RequestText":
        return RequestText(bool(self._earlier) and self._seeds.admit(int(rng.seeds[b])))

    def _catch_up(self, request: "RequestText", context: Context) -> None:
        read = request.text.size
        request.text.read(context.tokens[read:])
        if self._earlier:
            request.output += context.tokens[max(read, context.prompt_length) :]

    def _keep_output(self, request: "RequestText") -> None:
        """Add a finished request's output to the newer generation; drop the older one when the newer is full."""
        if not self._earlier or not request.output:
            return
        if self._earlier[0].size > KEPT_TOKENS:
            self._earlier = [Automaton(), self._earlier[0]]
        self._earlier[0].read(request.output)
        self._earlier[0].append(BREAK)

    def _guess(self, request: "RequestText", tokens: Sequence[int], slots: int) -> Guess:
        source, match = request.text, request.text.repeated()
        for other in (*(self._earlier if request.uses_earlier else ()), self._corpus):
            if other.size and (found := other.match(tokens[-MAX_MATCH:])).length > match.length:
                source, match = other, found

        def expand(node: Match) -> list[tuple[Follower, Match]]:
            return source.followers(node, self._branches)

        if match.length == 0:
            return grow(request.text.replaced(), expand, slots, least=self._least / BACK_OFF)
        return grow(match, expand, slots, least=self._least)


def read_corpus(path: str | Path) -> list[list[int]]:
    """Read texts from a file: one per line, token ids separated by blanks."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        return [[int(word) for word in line.split()] for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} must hold token ids, one text a line, blanks between ids: {error}") from None


class Match(NamedTuple):
    """A state, and the number of matched tokens; the state's runs may be longer."""

    state: int
    length: int


class Automaton:
    """A suffix automaton with occurrence counts.

    States are indices into parallel lists: objects would take several times the memory.
    """

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
        """Build the automaton of several texts; no run reaches from one text into the next."""
        made = cls()
        for text in texts:
            made.read(text)
            made.append(BREAK)
        return made

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add one token to the text, in amortised constant time."""
        new = self._state({}, -1, self._length[self._last] + 1, 0)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = TOP if state == -1 else self._ending(state, token)
        self._previous, self._last, self._token = self._last, new, token
        self.size += 1
        self._count_occurrence(new)

    def repeated(self) -> Match:
        """Find the longest suffix of the text that also occurs earlier in it."""
        state = max(self._link[self._last], TOP)
        return Match(state, self._length[state])

    def replaced(self) -> Match:
        """Find the match of the text with its last token replaced by the one that was expected there."""
        state = max(self._link[self._previous], TOP)
        expected = self.followers(Match(state, self._length[state]), 2)
        others = (match for follower, match in expected if follower.token != self._token)
        return next(others, Match(TOP, 0))

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the longest suffix of `tokens` that occurs anywhere in the text."""
        state = length = 0
        for token in tokens:
            while state != TOP and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return Match(state, length)

    def followers(self, match: Match, most: int) -> list[tuple[Follower, Match]]:
        """Return up to `most` tokens that followed this match, then its shorter suffixes, with the match after each.

        They are ordered by count, then the latest first. A longer match is trusted more: after a match of L tokens that
        occurred once, a path of d tokens has the share L / (L + d). The empty run is skipped: frequency alone is not a
        match.
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
        """Return the most frequent tokens after a state, and the states they lead to."""
        edges = ((token, to) for token, to in self._next[state].items() if token != BREAK)
        return nlargest(most, edges, key=lambda edge: (self._count[edge[1]], self._latest[edge[1]]))

    def _ending(self, state: int, token: int) -> int:
        """Return the state of `state`'s longest run followed by `token`.

        If that state also stands for longer runs, split it: those runs do not end here.
        """
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
        """Add a state with the occurrence counts of the state `like`."""
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(self._count[like])
        self._latest.append(self._latest[like])
        return len(self._next) - 1

    def _count_occurrence(self, state: int) -> None:
        for _ in range(MAX_COUNTED_LINKS):
            if state <= TOP:
                return
            self._count[state] += 1
            self._latest[state] = self.size
            state = self._link[state]


@dataclass(slots=True)
class RequestText:
    """A request's own automaton, whether it may search earlier outputs, and the output to keep when it ends."""

    uses_earlier: bool
    text: Automaton = field(default_factory=Automaton)
    output: list[int] = field(default_factory=list)
