"""Mutants of the drafter: drafts are drawn from one distribution and declared as drawn from another."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import controls
from auditor.mutants.mutant import REPETITIVE, mutant
from auditor.mutants.rules import COUNTED
from auditor.mutants.world import World
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import Draft, Verdict
from draftproof.drafters.interface import Context, Drafter
from draftproof.engine.engine import Engine
from draftproof.rules import RULES
from draftproof.rules.token import leading

Change = Callable[[Sequence[Context], Draft], Draft]


class Changed:
    """The production drafter, with its draft changed on the way to the verifier."""

    def __init__(self, inner: Drafter, change: Change) -> None:
        self.inner, self.change = inner, change

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        draft = self.inner.propose(contexts, k, rng)
        return self.change(contexts, draft) if draft.q is not None else draft


def declared(samplings: Callable[[SamplingParams], SamplingParams]) -> Change:
    """Declare the distribution that the drafter's logits give under another sampling."""

    def change(contexts: Sequence[Context], draft: Draft) -> Draft:
        assert draft.q is not None
        dist = warp(draft.q.logits, [samplings(context.sampling) for context in contexts])
        return replace(draft, q=dist)

    return change


@mutant("wrong q")
def argmax_with_softmax_q(world: World) -> Engine:
    """Greedy drafts, scored with softmax q: after a widely copied implementation, and transformers#32867."""
    return world.engine(drafter=Changed(world.drafter(temperature=0.0), declared(lambda sampling: sampling)))


@mutant("wrong q", sampling=SamplingParams(temperature=0.8, top_k=12))
def raw_q(world: World) -> Engine:
    """Drafts drawn after temperature and top-k, q declared raw (transformers#47932)."""
    return world.engine(drafter=Changed(world.drafter(), declared(lambda _: SamplingParams())), rule="block")


@mutant("wrong q", sampling=SamplingParams(temperature=0.7))
def temperature_on_one_side(world: World) -> Engine:
    """Drafts drawn at temperature 1, q declared at the request's 0.7."""
    return world.engine(drafter=Changed(world.drafter(temperature=1.0), declared(lambda sampling: sampling)))


@mutant(
    "wrong q",
    budget=None,
    because="the total variation is 1e-3: the certificate says which bias it would have seen, and that is a larger one",
)
def drafts_scored_in_bfloat16(world: World) -> Engine:
    """Drafts drawn in float32, q computed in bfloat16 (DeepSpec#31)."""

    def change(contexts: Sequence[Context], draft: Draft) -> Draft:
        assert draft.q is not None
        return replace(draft, q=warp(draft.q.logits.bfloat16().float(), [c.sampling for c in contexts]))

    return world.engine(drafter=Changed(world.drafter(), change))


@mutant("wrong q")
def law_of_the_row_above(world: World) -> Engine:
    """q is shifted by one position: each token is tested against the distribution of the token before it."""

    def change(_: Sequence[Context], draft: Draft) -> Draft:
        assert draft.q is not None
        probs = draft.q.probs()
        return replace(draft, q=Distribution.of(torch.cat([probs[:, :1], probs[:, :-1]], 1)))

    return world.engine(drafter=Changed(world.drafter(), change))


@mutant("adaptive length")
def weak_drafts_discarded(world: World) -> Engine:
    """A drawn token that looks weak is thrown away, and only what came before it is submitted."""

    def change(_: Sequence[Context], draft: Draft) -> Draft:
        assert draft.q is not None
        strong = draft.q.log_prob(draft.tokens).exp() > 0.1
        return replace(draft, lengths=leading(strong).minimum(draft.lengths))

    return world.engine(drafter=Changed(world.drafter(), change), rule="block")


@mutant("randomness", world=COUNTED, budget=500_000)
def shared_noise_under_token(world: World) -> Engine:
    """Drafts drawn with the target's own random numbers, the round's last token by the same race, tested with p/q."""

    class Shared:
        inner = world.drafter()

        def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
            return self.inner.propose(contexts, k, replace(rng, shared=True))

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        if not draft.tokens.shape[1]:
            return RULES["coupled"](p, draft, rng)
        return controls.shared_noise_under_token(p, replace(draft, shared_rng=False), rng)

    return world.engine(drafter=Shared(), rule=verify)


@mutant("wrong q", drafts="lookup", sampling=REPETITIVE)
def copied_token_with_a_made_up_q(world: World) -> Engine:
    """Copied drafts, tested as if they had been drawn with probability 1/2: min(1, 2p), and the residual of that."""

    class Doubtful:
        inner: Any = world.lookup()

        def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
            draft = self.inner.propose(contexts, k, rng)
            spread = torch.full((*draft.tokens.shape, world.vocab_size), 0.5 / (world.vocab_size - 1))
            spread.scatter_(-1, draft.tokens.clamp_min(0)[..., None], 0.5)
            return replace(draft, q=Distribution.of(spread))

    return world.engine(drafter=Doubtful())
