"""Draft by k-gram counts over the text so far, with back-off from k = N to 2.

After N-gram assisted decoding (Stewart et al. 2024, "ANPD", arXiv 2404.08698, and its descendants). The counts are
filled from the prompt, the output, and optionally the target's most likely tokens (`fillers`). If nothing is known of
the last token, it is assumed to replace another one, as after an edit: the draft continues after the token that was
expected in its place. Tokens are chosen and never drawn, so every rule is exact for any way of picking them.
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
from draftproof.drafters.memory import Memory, NewSeeds

Run = tuple[int, ...]

KEPT_RUNS: Final = 200_000
"""Runs kept between requests; a run costs about 400 bytes."""


class NGram:
    """Drafter that uses k-gram counts.

    longest          the N of N-gram: up to N − 1 tokens of context
    least            end a path where its estimated probability falls below this
    fillers          count this many of the target's most likely tokens at every scored position; each weighs less than
                     a token that occurred
    stop_at_unknown  end a draft where no run is known; False always drafts all k tokens and ignores `least`, if need be
                     with the most frequent token
    keep             share one table between requests; a request with the seed of an earlier one gets its own
    branches         children per node; more than one makes a tree, for rule="tree"
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
        self._kept = Grams(*self._orders, limit=KEPT_RUNS) if keep else None
        self._seeds = NewSeeds()
        self._memory: Memory[RequestCounts] = Memory()

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] chosen tokens for each row; see `Drafter`."""
        self._memory.forget(contexts)
        guesses = []
        for b, context in enumerate(contexts):
            request = self._memory.of(context, partial(self._begin, rng, b))
            self._catch_up(request, context)
            guesses.append(self._guess(request.grams, self._end(context.tokens), k[b]))
        return chosen(guesses, rng.seeds.device, tree=self._branches > 1)

    def _begin(self, rng: Philox, b: int) -> "RequestCounts":
        if self._kept is not None and self._seeds.admit(int(rng.seeds[b])):
            return RequestCounts(self._kept)
        return RequestCounts(Grams(*self._orders))

    def _catch_up(self, request: "RequestCounts", context: Context) -> None:
        request.grams.read(context.tokens, request.read)
        request.read = len(context.tokens)
        outputs = context.target_outputs
        if self.features.top and outputs is not None and outputs.stop > request.filled:
            self._fill(request.grams, context.tokens, outputs)
            request.filled = outputs.stop

    def _fill(self, grams: "Grams", tokens: Sequence[int], outputs: TargetOutputs) -> None:
        """Count the target's most likely tokens; the one of rank r weighs 1 / (r + 2)."""
        if outputs.top is None:
            return
        first = outputs.stop - len(outputs.top)
        for i, likely in enumerate(outputs.top.numpy().tolist()):
            before = self._end(tokens, first + i + 1)
            for rank, token in enumerate(likely[: self.features.top]):
                grams.add(before, token, 1 / (rank + 2))

    def _end(self, tokens: Sequence[int], stop: int | None = None) -> Run:
        stop = len(tokens) if stop is None else stop
        return tuple(tokens[max(0, stop - self._reach) : stop])

    def _guess(self, grams: "Grams", before: Run, slots: int) -> Guess:
        expand = partial(self._expand, grams)
        guess = grow(before, expand, slots, least=self._least)
        if guess.tokens or not slots or not before:
            return guess
        return grow(grams.replaced(before), expand, slots, least=self._least / BACK_OFF)

    def _expand(self, grams: "Grams", before: Run) -> Iterator[tuple[Follower, Run]]:
        for follower in grams.followers(before, self._branches):
            yield follower, (*before, follower.token)[-self._reach :]


class Grams:
    """A table of k-gram counts: how often each token followed each run of k − 1 tokens, k from `shortest` to `longest`.

    Counts may be fractions. Among equal counts the latest token comes first: a dict keeps insertion order, so a token
    that is counted moves to the end. Above `limit` runs the older half is dropped.
    """

    def __init__(self, longest: int, shortest: int = 2, limit: int | None = None) -> None:
        self.longest = longest
        self.shortest = shortest
        self.limit = limit
        self._follow: dict[Run, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._follow)

    def add(self, before: Run, token: int, weight: float = 1.0) -> None:
        """Count `token` after every run that `before` ends with."""
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
        """Count every token from index `start` on after the tokens before it."""
        reach = self.longest - 1
        for i in range(start, len(tokens)):
            self.add(tuple(tokens[max(0, i - reach) : i]), tokens[i])

    def followers(self, before: Run, most: int) -> list[Follower]:
        """Return up to `most` tokens that followed the longest known run at the end of `before`, then shorter runs.

        A longer run is trusted more: a token that occurred once after a run of n tokens has the share n / (n + 1).
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
        """Replace the last token of `before` by the one that was expected there; return () if none was."""
        *head, last = before
        others = (f.token for f in self.followers(tuple(head), 2) if f.token != last)
        return next(((*head, token) for token in others), ())


@dataclass(slots=True)
class RequestCounts:
    """A request's table, and how far its tokens (`read`) and the target's outputs (`filled`) have been counted."""

    grams: Grams
    read: int = 0
    filled: int = 0
