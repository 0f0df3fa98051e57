"""Estimate how wrong a mutant is without the audit: a lower bound on the total variation of its first three tokens.

Any event gives one: |P(event) − p(event)| ≤ TV. The event is learned on one third of the texts, the view of the tokens
is chosen on another, and the last third is only counted, so that the estimate is not biased upward by the choice.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from auditor.mutants.mutant import Mutant
from auditor.mutants.world import World
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked
from engine.plain_distribution import joint_distribution

TEXTS = 12_000
"""Texts per estimate, for a standard error of 0.008."""
DRAFTED = 2
"""Tokens drafted per round: the bonus token is then among the first three."""

BUDGET = 5
"""Tokens requested: drafts reach past the three that are counted."""

VIEWS = ((0,), (1,), (2,), (0, 1), (1, 2))
"""Positions that an event depends on: one of three, or two neighbours."""


class Bound(NamedTuple):
    """An estimate of a lower bound, and its standard error."""

    total_variation: float
    error: float

    def __str__(self) -> str:
        small = self.total_variation < 3 * self.error
        return f"< {self.total_variation + 3 * self.error:.2f}" if small else f"{self.total_variation:.3f}"


@cache
def _dist(vocab_size: int, temperature: float, rest: tuple[tuple[str, object], ...]) -> Tensor:
    world = World(vocab_size)
    options = dict(rest) | {"logit_bias": dict(dict(rest)["logit_bias"])}  # type: ignore[call-overload]
    dist = joint_distribution(world.hf, world.prompts[0], SamplingParams(temperature=temperature, **options), 3)
    return dist.view([vocab_size] * 3)


def distribution_of_three(world: World, sampling: SamplingParams) -> Tensor:
    """Return the joint distribution of the first three tokens after the first prompt, [V, V, V]."""
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    rest = tuple((name, getattr(sampling, name)) for name in names)
    return _dist(
        world.vocab_size, sampling.temperature, (*rest, ("logit_bias", tuple(sorted(sampling.logit_bias.items()))))
    )


def total_variation(mutant: Mutant, texts: int = TEXTS) -> Bound:
    """Estimate a lower bound on the mutant's total variation from this many texts."""
    decoder = mutant.build(replace(mutant.world, drafted=DRAFTED))
    seeds = [i * 1_000_003 + 11 for i in range(texts)]
    prompts = [mutant.world.prompts[0]] * texts
    with unchecked():
        samples = decoder.decode(prompts, mutant.sampling, max_tokens=BUDGET, seeds=seeds)
    tokens = torch.tensor([[*sample.tokens, 0, 0, 0][:3] for sample in samples])
    learn, choose, count = tokens.chunk(3)
    dist = distribution_of_three(mutant.world, mutant.sampling)
    best = max(((_excess(choose, view, _event(learn, view, dist), dist), view) for view in VIEWS), key=lambda x: x[0])
    event = _event(learn, best[1], dist)
    return Bound(_excess(count, best[1], event, dist), 0.5 / len(count) ** 0.5)


def _frequencies(tokens: Tensor, view: tuple[int, ...], dist: Tensor) -> Tensor:
    code = sum(tokens[:, i] * len(dist) ** n for n, i in enumerate(reversed(view)))
    assert isinstance(code, Tensor)
    return torch.bincount(code, minlength=len(dist) ** len(view)).double() / len(tokens)


def _expected(view: tuple[int, ...], dist: Tensor) -> Tensor:
    return dist.sum([i for i in range(3) if i not in view]).flatten()


def _event(tokens: Tensor, view: tuple[int, ...], dist: Tensor) -> Tensor:
    """Return the outcomes that occurred more often than expected."""
    return _frequencies(tokens, view, dist) > _expected(view, dist)


def _excess(tokens: Tensor, view: tuple[int, ...], event: Tensor, dist: Tensor) -> float:
    return float((_frequencies(tokens, view, dist) - _expected(view, dist))[event].sum())
