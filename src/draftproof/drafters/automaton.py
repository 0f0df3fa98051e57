"""A suffix automaton: every run of tokens in a text, found in one step a token, with how often it occurs.

Blumer et al. 1985, built as the text grows. A state stands for the runs that end at the same places; its link leads
to the longest shorter end of them that occurs elsewhere too.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import Final, NamedTuple

from draftproof.drafters.guess import BACK_OFF, Follower

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
