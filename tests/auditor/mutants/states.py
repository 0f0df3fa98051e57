"""Mutants of the engine's state: wrong cache rollback, shared seeds, tokens after the end of a text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auditor.mutants.mutant import REPETITIVE, mutant
from auditor.mutants.world import World
from draftproof.auditor.interface import Decoder, Sample
from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from draftproof.engine.request import Session
from draftproof.engine.round import Emitted
from draftproof.models.cache import SlotCache
from draftproof.models.hf import HFModel
from draftproof.models.interface import Cache, Forward

Keep = Callable[[SlotCache, Tensor, Tensor | None], None]
right_keep = SlotCache.keep


class Misremembering:
    """The target model with a cache whose rollback is wrong."""

    def __init__(self, model: HFModel, keep: Keep) -> None:
        self.model = model
        self.vocab_size, self.max_length, self.device = model.vocab_size, model.max_length, model.device

        class Wrong(SlotCache):
            def keep(self, counts: Tensor, path: Tensor | None = None) -> None:
                # prefill is right
                (keep if self.bound else right_keep)(self, counts, path)

            def _like(self, rows: int, capacity: int) -> "Wrong":
                return Wrong(len(self.layers), rows, capacity, self._lengths.device)

        self.cache = Wrong

    def new_cache(self, rows: int, capacity: int = 0) -> SlotCache:
        right = self.model.new_cache(rows, capacity)
        return self.cache(len(right.layers), rows, capacity, self.device)

    def __call__(self, tokens: Tensor, cache: Cache, **options: Any) -> Forward:
        return self.model(tokens, cache, **options)


@mutant("state", drafts="lookup", sampling=REPETITIVE)
def last_kept_token_forgotten(world: World) -> Engine:
    """The last kept token's K/V is missing from the cache (vLLM#9730, on the target's side)."""
    keep: Keep = lambda cache, counts, path: right_keep(cache, counts - 1, path)  # noqa: E731
    return world.engine(model=Misremembering(world.target, keep), drafter=world.lookup())


@mutant("state")
def rejected_token_remembered(world: World) -> Engine:
    """One rejected token stays in the cache: the write index is not rolled back all the way."""
    keep: Keep = lambda cache, counts, path: right_keep(cache, (counts + 1).clamp_max(cache.width), path)  # noqa: E731
    return world.engine(model=Misremembering(world.target, keep), rule="block")


@mutant("state")
def rows_rolled_back_together(world: World) -> Engine:
    """A ragged batch is rolled back to its longest row: the others keep rejected tokens (arXiv 2510.22876)."""
    keep: Keep = lambda cache, counts, path: right_keep(cache, counts.max().expand_as(counts), path)  # noqa: E731
    return world.engine(model=Misremembering(world.target, keep))


@mutant("state")
def stale_slot_of_a_tree(world: World) -> Engine:
    """After a tree the cache keeps its first slots, whichever were accepted."""
    keep: Keep = lambda cache, counts, path: right_keep(cache, counts, None)  # noqa: E731
    return world.engine(model=Misremembering(world.target, keep), rule="tree", drafter=world.drafter(branches=2))


@mutant("state")
def prompt_read_twice(world: World) -> Engine:
    """The whole prompt is fed again on top of the cache: after a widely copied implementation."""

    class Twice(Misremembering):
        def __call__(self, tokens: Tensor, cache: Cache, **options: Any) -> Forward:
            if not cache.lengths.any():
                self.model(tokens, cache)
                right_keep(cache, torch.full_like(cache.lengths, tokens.shape[1]))
            return self.model(tokens, cache, **options)

    return world.engine(model=Twice(world.target, right_keep))


@mutant("state", sampling=SamplingParams(temperature=0.0))
def rejected_token_remembered_greedy(world: World) -> Engine:
    """One rejected token stays in the cache, under greedy decoding."""
    return rejected_token_remembered(world)


class Reseeded:
    """The real engine with other seeds than the request's."""

    def __init__(self, engine: Engine, seeds: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.engine, self.seeds = engine, seeds

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> Sequence[Sample]:
        return self.engine.decode(prompts, sampling, max_tokens=max_tokens, seeds=self.seeds(seeds))


@mutant("randomness")
def seed_ignored(world: World) -> Decoder:
    """Every request has seed 0 (vLLM#6038)."""
    return Reseeded(world.engine(), lambda seeds: [0] * len(seeds))


@mutant("randomness")
def seed_of_the_batch(world: World) -> Decoder:
    """One seed for a whole batch: its rows throw the same coins (vLLM#50440)."""
    return Reseeded(world.engine(), lambda seeds: [seeds[0]] * len(seeds))


END = 7


@mutant("state", ends=(END,))
def tokens_after_the_end(world: World) -> Engine:
    """Only a round's last token is checked for the end of the text: an accepted one is missed (sglang#33758)."""

    class Overrunning(Engine):
        def _extend(self, session: Session, emitted: Emitted) -> None:
            request = session.request
            session.request = replace(request, ends=request.ends & set(emitted.tokens[-1:]))
            super()._extend(session, emitted)
            session.request = request

    return world.engine(kind=Overrunning, eos=(END,), rule="block")
