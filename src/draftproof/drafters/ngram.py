"""Guess what followed the last few tokens before: k-gram counts over the text so far, with back-off (k from N to 2).

After N-gram assisted decoding (Stewart et al. 2024, "ANPD", arXiv 2404.08698, and its descendants): the counts are
filled from the prompt, then from what is emitted and from what the target thought likely (`fillers`). A token of which
nothing is known is taken to stand in another's place, as after an edit: the guess goes on behind the one that was to be
expected there. Its tokens are chosen and never drawn, so any rule keeps them exact, and any way of picking them is
allowed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Final

from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.build import BACK_OFF, Follower, Guess, check_count, check_share, chosen, grow
from draftproof.drafters.interface import Context, TargetFeatures, TargetOutputs
from draftproof.drafters.memory import Memory, Strangers

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


KEPT: Final = 200_000
"""Runs remembered between requests; a run costs some 400 bytes."""


@dataclass(slots=True)
class Reading:
    """How far a request's text has been counted, and in which table."""

    grams: Grams
    read: int = 0
    shown: int = 0


class NGram:
    """Drafts by k-gram counts.

    longest          the N of N-gram: up to N − 1 tokens of context
    least            where a path seems less likely than this it ends
    fillers          how many of the target's most likely tokens to count at every position it scored; each counts as
                     less than a token that was seen
    stop_at_unknown  end a draft where no run is known; False drafts all it is asked to, whatever `least` says, if need
                     be with the most frequent token
    keep             one table for all requests, kept between them; who has the seed of an earlier request gets its own
    branches         continuations of a node; more than one makes a tree, for rule="tree"
    """

    def __init__(
        self,
        longest: int = 6,
        *,
        least: float = 0.15,
        fillers: int = 0,
        stop_at_unknown: bool = True,
        keep: bool = False,
        branches: int = 1,
    ) -> None:
        check_count("longest", longest, 2)
        check_count("fillers", fillers, 0)
        check_count("branches", branches, 1)
        check_share("least", least)
        self.features = TargetFeatures(top=fillers)
        self._least = least if stop_at_unknown else 0.0
        self._branches, self._reach = branches, longest - 1
        self._orders = longest, 2 if stop_at_unknown else 1
        self._kept = Grams(*self._orders, limit=KEPT) if keep else None
        self._strangers = Strangers()
        self._memory: Memory[Reading] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] chosen tokens; see `Drafter`."""
        self._memory.forget(contexts)
        guesses = []
        for b, context in enumerate(contexts):
            reading = self._memory.of(context, partial(self._begin, rng, b))
            self._catch_up(reading, context)
            guesses.append(self._guess(reading.grams, self._end(context.tokens), k[b]))
        return chosen(guesses, rng.seeds.device, tree=self._branches > 1)

    def _begin(self, rng: Philox, b: int) -> Reading:
        if self._kept is not None and self._strangers.admit(int(rng.seeds[b])):
            return Reading(self._kept)
        return Reading(Grams(*self._orders))

    def _catch_up(self, reading: Reading, context: Context) -> None:
        reading.grams.read(context.tokens, reading.read)
        reading.read = len(context.tokens)
        if self.features.top and context.shown is not None and context.shown.stop > reading.shown:
            self._fill(reading.grams, context.tokens, context.shown)
            reading.shown = context.shown.stop

    def _fill(self, grams: Grams, tokens: Sequence[int], shown: TargetOutputs) -> None:
        if shown.top is None:
            return
        first = shown.stop - len(shown.top)
        for i, likely in enumerate(shown.top.numpy().tolist()):
            before = self._end(tokens, first + i + 1)
            for rank, token in enumerate(likely[: self.features.top]):
                grams.add(before, token, 1 / (rank + 2))

    def _end(self, tokens: Sequence[int], stop: int | None = None) -> Run:
        stop = len(tokens) if stop is None else stop
        return tuple(tokens[max(0, stop - self._reach) : stop])

    def _guess(self, grams: Grams, before: Run, slots: int) -> Guess:
        expand = partial(self._expand, grams)
        guess = grow(before, expand, slots, least=self._least)
        if guess.tokens or not slots or not before:
            return guess
        return grow(grams.replaced(before), expand, slots, least=self._least / BACK_OFF)

    def _expand(self, grams: Grams, before: Run) -> Iterator[tuple[Follower, Run]]:
        for follower in grams.followers(before, self._branches):
            yield follower, (*before, follower.token)[-self._reach :]
