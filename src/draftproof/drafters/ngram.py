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
from typing import Final

from draftproof.core.noise import Noise
from draftproof.core.types import Draft
from draftproof.drafters import Asks, Context, Shown
from draftproof.drafters.grams import Grams, Run
from draftproof.drafters.guess import BACK_OFF, Follower, Guess, check_count, check_share, chosen, grow
from draftproof.drafters.memory import Memory, Strangers

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
        self.asks = Asks(top=fillers)
        self._least = least if stop_at_unknown else 0.0
        self._branches, self._reach = branches, longest - 1
        self._orders = longest, 2 if stop_at_unknown else 1
        self._kept = Grams(*self._orders, limit=KEPT) if keep else None
        self._strangers = Strangers()
        self._memory: Memory[Reading] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], noise: Noise) -> Draft:
        """Up to k[b] chosen tokens; see `Drafter`."""
        self._memory.forget(contexts)
        guesses = []
        for b, context in enumerate(contexts):
            reading = self._memory.of(context, partial(self._begin, noise, b))
            self._catch_up(reading, context)
            guesses.append(self._guess(reading.grams, self._end(context.tokens), k[b]))
        return chosen(guesses, noise.seeds.device, tree=self._branches > 1)

    def _begin(self, noise: Noise, b: int) -> Reading:
        if self._kept is not None and self._strangers.admit(int(noise.seeds[b])):
            return Reading(self._kept)
        return Reading(Grams(*self._orders))

    def _catch_up(self, reading: Reading, context: Context) -> None:
        reading.grams.read(context.tokens, reading.read)
        reading.read = len(context.tokens)
        if self.asks.top and context.shown is not None and context.shown.stop > reading.shown:
            self._fill(reading.grams, context.tokens, context.shown)
            reading.shown = context.shown.stop

    def _fill(self, grams: Grams, tokens: Sequence[int], shown: Shown) -> None:
        if shown.top is None:
            return
        first = shown.stop - len(shown.top)
        for i, likely in enumerate(shown.top.numpy().tolist()):
            before = self._end(tokens, first + i + 1)
            for rank, token in enumerate(likely[: self.asks.top]):
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
