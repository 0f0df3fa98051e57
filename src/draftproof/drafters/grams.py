"""Counts of what followed every short run of tokens, with back-off from longer runs to shorter ones."""

from collections.abc import Sequence
from heapq import nlargest
from itertools import islice

from draftproof.drafters.guess import BACK_OFF, Follower

Run = tuple[int, ...]


class Grams:
    """A k-gram is a run of k − 1 tokens and the token behind it; k goes from `shortest` to `longest`.

    Counts may be fractions. Among equal counts the token seen last comes first: a dict keeps the order in which its
    keys came, so a token that is counted moves to the end. Past `limit` runs the older half is dropped.
    """

    def __init__(self, longest: int, shortest: int = 2, limit: int | None = None) -> None:
        self.longest = longest
        self.shortest = shortest
        self.limit = limit
        self._follow: dict[Run, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._follow)

    def add(self, before: Run, token: int, weight: float = 1.0) -> None:
        """Count `token` behind every run that `before` ends with."""
        n = len(before)
        for size in range(self.shortest - 1, min(n, self.longest - 1) + 1):
            run = before[n - size :]
            counts = self._follow.get(run)
            if counts is None:
                self._follow[run] = {token: weight}
            else:
                counts[token] = counts.pop(token, 0.0) + weight
        if self.limit is not None and len(self._follow) > self.limit:
            self._follow = dict(islice(self._follow.items(), self.limit // 2, None))

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Count every token from index `start` on behind those before it."""
        reach = self.longest - 1
        for i in range(start, len(tokens)):
            self.add(tuple(tokens[max(0, i - reach) : i]), tokens[i])

    def followers(self, before: Run, most: int) -> list[Follower]:
        """Up to `most` tokens that followed the longest known run at the end of `before`, then shorter runs.

        The longer the run, the surer: seen once behind a run of n tokens is a share of n / (n + 1), no certainty.
        """
        found: dict[int, float] = {}
        trust, n = 1.0, len(before)
        for size in range(min(n, self.longest - 1), self.shortest - 2, -1):
            counts = self._follow.get(before[n - size :])
            if counts is None:
                continue
            unit = trust / (sum(counts.values()) + 1 / max(size, 1))
            for token in nlargest(most, reversed(counts), key=counts.__getitem__):
                found.setdefault(token, counts[token] * unit)
            if len(found) >= most:
                break
            trust *= BACK_OFF
        return [Follower(token, share) for token, share in islice(found.items(), most)]

    def replaced(self, before: Run) -> Run:
        """`before` with another token at its end, the one that was to be expected there; empty where none was."""
        *head, last = before
        others = (f.token for f in self.followers(tuple(head), 2) if f.token != last)
        return next(((*head, token) for token in others), ())
