"""Mutants of the rule: the wrong rules of controls.py in the real engine, and defects that only an engine shows."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import controls
from auditor.mutants.mutant import REPETITIVE, mutant
from auditor.mutants.world import World
from draftproof.core.distribution import Distribution
from draftproof.core.draw import close
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams
from draftproof.core.tree import real
from draftproof.core.types import Draft, Verdict
from draftproof.engine.engine import Engine
from draftproof.rules import RULES, Verifier
from draftproof.rules.chain import StopTable, log_ratios, verdict
from draftproof.rules.token import closing, leading
from draftproof.rules.tree import Walk, tree

COUNTED = World(vocab_size=8, drafted=2)
"""A world whose joint distribution of three tokens is counted, for defects that no bet points to."""


def sampled(stop_table: Callable[[Distribution, Draft], StopTable]) -> Verifier:
    """Return the verifier of a chain that a stop table describes: stop at the first point whose coin falls below it."""

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        if not draft.tokens.shape[1]:
            return RULES["token"](p, draft, rng)
        table = stop_table(p, draft)
        coins = rng.uniform(Purpose.ACCEPT, torch.arange(table.chance.shape[1]))
        stop_point = (coins < table.chance).int().argmax(1)
        rows = torch.arange(len(stop_point))
        return verdict(draft, table.node[rows, stop_point], close(table.closing[rows, stop_point], rng))

    return verify


def drafted(wrong: Callable[[Distribution, Draft, Philox], Verdict]) -> Verifier:
    """Use a wrong verifier of controls.py in rounds that have a draft, and the right one in others."""

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        return (wrong if draft.tokens.shape[1] else RULES["token"])(p, draft, rng)

    return verify


def _register(family: str, wrong: Any, rule: Verifier, **options: Any) -> None:
    """Register a mutant whose only defect is its rule, with the control's name and docstring."""

    def build(world: World) -> Engine:
        return world.engine(rule=rule, drafter=world.lookup() if options.get("drafts") == "lookup" else None)

    build.__name__, build.__doc__ = wrong.__name__, wrong.__doc__
    mutant(family, **options)(build)


for stop_table in (
    controls.residual_skipped,
    controls.residual_swapped,
    controls.residual_not_clamped,
):
    _register("residual", stop_table, sampled(stop_table))
_register(
    "residual", controls.bonus_from_the_residual, sampled(controls.bonus_from_the_residual), world=World(drafted=1)
)
_register("acceptance", controls.coins_times_nine_tenths, sampled(controls.coins_times_nine_tenths), budget=30_000)
_register("acceptance", controls.first_coin_halved, controls.first_coin_halved, budget=30_000)
for stop_table in (
    controls.block_stops_at_the_first_failure,
    controls.block_with_token_thresholds,
):
    _register("block", stop_table, sampled(stop_table))
_register("block", controls.block_last_test_uncapped, sampled(controls.block_last_test_uncapped), budget=20_000)
_register(
    "block",
    controls.block_with_the_token_residual,
    sampled(controls.block_with_the_token_residual),
    budget=None,
    because="its total variation is below the 0.02 that is asked for: 0.016 at most, on distributions made for it",
)
_register("randomness", controls.coins_of_the_first_round, drafted(controls.coins_of_the_first_round))
_register("randomness", controls.coin_reused_for_closing, drafted(controls.coin_reused_for_closing))
for wrong, budget in {
    controls.draft_noise_reused_for_closing: 250_000,
    controls.coins_thrown_twice: 800_000,
}.items():
    _register("randomness", wrong, drafted(wrong), world=COUNTED, budget=budget)
_register(
    "residual",
    controls.redraws_after_a_mismatch,
    drafted(controls.redraws_after_a_mismatch),
    drafts="lookup",
    sampling=REPETITIVE,
)


@contextmanager
def _rejecting(wrong: Callable[[Walk, Tensor, Tensor], None]) -> Any:
    right = Walk._reject
    Walk._reject = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Walk._reject = right  # type: ignore[method-assign]


@mutant("tree")
def siblings_against_the_same_p(world: World) -> Engine:
    """A tree whose rejected slots are not taken out of the parent's distribution."""

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        with _rejecting(lambda walk, rows, node: None):
            return tree(p, draft, rng)

    return world.engine(rule=verify, drafter=world.drafter(branches=2))


class Coarse(Philox):
    """A generator of uniforms of eight bits, as a kernel draws them in bfloat16."""

    def pairs(self, purpose: Any, lanes: Tensor, j: int = 0) -> Tensor:
        fine = Philox(self.seeds, self.starts).pairs(purpose, lanes, j)
        return (fine * 256).floor() / 256

    def take(self, rows: Tensor) -> "Coarse":
        return type(self)(self.seeds[rows], self.starts[rows], self.shared)


def _at_most(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Verify tokens by u ≤ p/q with u in [0, 1)."""
    kept = rng.coins(draft.tokens.shape[1]).log() <= log_ratios(p, draft)
    accepted = leading(kept & real(draft))
    return verdict(draft, accepted, closing(p, draft, accepted, rng))


@mutant("randomness", sampling=SamplingParams(top_k=8))
def impossible_token_kept_by_a_coin_of_zero(world: World) -> Engine:
    """u ≤ p/q with coins of eight bits: one in 256 is 0 and keeps a token of probability 0 (sglang#35771)."""

    class Unfiltered:
        """A drafter that ignores the request's top-k and declares so: exact, but often outside the target's support."""

        inner = world.drafter()

        def propose(self, contexts: Any, k: Any, rng: Philox) -> Draft:
            return self.inner.propose([_Plain(context) for context in contexts], k, rng)

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        return _at_most(p, draft, Coarse(rng.seeds, rng.starts))

    return world.engine(drafter=Unfiltered(), rule=verify)


class _Plain:
    """A context with default sampling parameters."""

    def __init__(self, context: Any) -> None:
        self.id, self.tokens, self.prompt_length = context.id, context.tokens, context.prompt_length
        self.target_outputs = context.target_outputs
        self.sampling = replace(SamplingParams(), seed=context.sampling.seed)


@mutant("randomness", budget=None, because="a coin of exactly 0 comes once in 2^53 throws; with 24 bits, in 2^24")
def coin_of_zero_in_53_bits(world: World) -> Engine:
    """u ≤ p/q instead of u < p/q."""
    return world.engine(rule=_at_most)
