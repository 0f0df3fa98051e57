"""Mutants of the target's distribution: a logits processor missing, stale, or applied at the wrong step."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from auditor.mutants.mutant import mutant
from auditor.mutants.rules import sampled
from auditor.mutants.world import World
from draftproof.core.distribution import Distribution, normalise
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import Draft, History
from draftproof.engine.engine import Engine
from draftproof.engine.request import Session
from draftproof.engine.round import TargetDistributions
from draftproof.models.interface import Forward
from draftproof.rules.chain import StopTable
from draftproof.rules.token import stop_table as token_stop_table

FREQUENCY = SamplingParams(frequency_penalty=1.0)
REPETITION = SamplingParams(repetition_penalty=1.5)


def dists(
    sampling: Callable[[SamplingParams], SamplingParams] = lambda sampling: sampling,
    *,
    drafted: bool = True,
    history: Callable[[History], History] = lambda history: history,
) -> TargetDistributions:
    """Compute the engine's distributions with another sampling, without the draft tokens, or with another history."""

    def wrong(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
        samplings = [sampling(s.sampling) for s in sessions]
        seen = [history(s.history) for s in sessions]
        return warp(forward.logits, samplings, seen, draft if drafted else None)

    return wrong


def on_drafts(sampling: Callable[[SamplingParams], SamplingParams]) -> TargetDistributions:
    """Use another sampling in rounds that verify a draft."""

    def wrong(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
        return dists(sampling if draft.tokens.shape[1] else lambda s: s)(sessions, forward, draft)

    return wrong


@mutant("processors", sampling=SamplingParams(temperature=0.7))
def target_at_temperature_one(world: World) -> Engine:
    """The target's distribution without the temperature (vLLM#10198)."""
    return world.engine(dists=dists(lambda s: replace(s, temperature=1.0)))


@mutant("processors", sampling=SamplingParams(top_k=12))
def target_without_top_k(world: World) -> Engine:
    """The target's distribution without top-k (vLLM#9834)."""
    return world.engine(dists=dists(lambda s: replace(s, top_k=None)))


@mutant("processors", sampling=SamplingParams(min_p=0.1))
def min_p_dropped_on_verified_rows(world: World) -> Engine:
    """min-p is not applied where a draft is verified (vLLM#42802)."""
    return world.engine(dists=on_drafts(lambda s: replace(s, min_p=0.0)), rule="block")


@mutant("processors", sampling=FREQUENCY)
def stale_penalties(world: World) -> Engine:
    """Penalties count what was emitted, and not the drafted tokens before a position (vLLM#18902)."""
    return world.engine(dists=dists(drafted=False), rule="block")


@mutant("processors", sampling=REPETITION)
def penalty_of_the_last_token_only(world: World) -> Engine:
    """The repetition penalty sees only the last emitted token and the draft (sglang#33643)."""
    return world.engine(dists=dists(history=lambda seen: History([], list(seen.output)[-1:])))


@mutant("processors", sampling=FREQUENCY)
def penalties_ignored_on_verified_rows(world: World) -> Engine:
    """No penalty where a draft is verified."""
    return world.engine(dists=on_drafts(lambda s: replace(s, frequency_penalty=0.0)))


@mutant("processors", sampling=SamplingParams(logit_bias={3: 2.0, 5: 1.5}))
def bias_dropped_on_verified_rows(world: World) -> Engine:
    """logit_bias is not applied where a draft is verified."""
    return world.engine(dists=on_drafts(lambda s: replace(s, logit_bias={})))


def _top_p_of(weights: Tensor, top_p: float) -> Tensor:
    ranked = weights.sort(-1, descending=True)
    kept = ranked.values.cumsum(-1) - ranked.values < top_p
    return normalise(torch.zeros_like(weights).scatter(-1, ranked.indices, ranked.values * kept), weights)


@mutant("processors", sampling=SamplingParams(top_p=0.8))
def top_p_after_the_residual(world: World) -> Engine:
    """Tests without top-p, which is then applied to the residual."""

    def stop_table(p: Distribution, draft: Draft) -> StopTable:
        right = token_stop_table(p, draft)
        return replace(right, closing=_top_p_of(right.closing, 0.8))

    return world.engine(dists=dists(lambda s: replace(s, top_p=1.0)), rule=sampled(stop_table))


@mutant("processors", sampling=SamplingParams(temperature=0.7))
def temperature_on_the_bonus_token_only(world: World) -> Engine:
    """Draft tokens are tested at temperature 1; only the bonus token has the request's."""

    def wrong(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
        right = dists()(sessions, forward, draft).probs()
        plain = dists(lambda s: replace(s, temperature=1.0))(sessions, forward, draft).probs()
        last = torch.arange(right.shape[1]) == draft.lengths[:, None]
        return Distribution.of(torch.where(last[..., None], right, plain))

    return world.engine(dists=wrong)
