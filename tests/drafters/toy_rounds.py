"""Run rounds without an engine on a toy target, and G-test the texts against the target's exact distribution."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import History, Verdict
from draftproof.drafters.interface import Drafter, TargetOutputs, features_of
from draftproof.models.toy import Toy
from draftproof.rules import RULES
from g_test import g_test

PLAIN = SamplingParams()


@dataclass
class Row:
    """A `Context`."""

    id: int
    tokens: list[int]
    prompt_length: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    target_outputs: TargetOutputs | None = None

    @property
    def history(self) -> History:
        return History(self.tokens[: self.prompt_length], self.tokens[self.prompt_length :])


def row(name: int, tokens: Sequence[int], sampling: SamplingParams = PLAIN) -> Row:
    return Row(name, list(tokens), len(tokens), sampling)


def rng_of(rows: Sequence[Row], *, shared: bool = False, seed: int = 0) -> Philox:
    seeds = torch.tensor([r.id * 7919 + seed for r in rows], dtype=torch.long)
    return Philox(seeds, torch.tensor([len(r.tokens) for r in rows], dtype=torch.long), shared)


def speak(
    target: Toy, drafter: Drafter, rule: str, rows: Sequence[Row], *, slots: int, length: int, seed: int = 0
) -> Tensor:
    """Run rounds until every row has `length` tokens of output, [rows, length]; finished rows leave the batch."""
    going = list(rows)
    cache = target.new_cache(len(going))
    texts = torch.tensor([r.tokens[:-1] for r in going]).long()
    target(texts, cache)
    cache.keep(torch.full((len(going),), texts.shape[1]))
    while going:
        rng = rng_of(going, shared=rule == "coupled", seed=seed)
        draft = drafter.propose(going, [slots - r.id % 3 for r in going], rng)
        last = torch.tensor([r.tokens[-1:] for r in going])
        scored = target(torch.cat([last, draft.tokens.clamp_min(0)], 1), cache, parents=draft.parents).logits
        p = warp(scored, [r.sampling for r in going], [r.history for r in going], draft)
        verdict = RULES[rule](p, draft, rng)
        cache.keep(verdict.accepted + 1, verdict.path)
        _extend(going, verdict, scored, features_of(drafter).top)
        stay = [b for b, r in enumerate(going) if len(r.tokens) - r.prompt_length < length]
        cache, going = cache.take(stay), [going[b] for b in stay]
    return torch.tensor([r.tokens[r.prompt_length : r.prompt_length + length] for r in rows])


def _extend(rows: Sequence[Row], verdict: Verdict, scored: Tensor, top: int) -> None:
    for b, r in enumerate(rows):
        accepted = int(verdict.accepted[b])
        if top:
            path = range(accepted) if verdict.path is None else verdict.path[b, :accepted].tolist()
            likely = scored[b, [0, *(slot + 1 for slot in path)]].topk(top).indices
            r.target_outputs = TargetOutputs(len(r.tokens) + accepted, likely)
        r.tokens += verdict.tokens[b, : accepted + 1].tolist()


def exact_distribution(target: Toy, prompt: Sequence[int], sampling: SamplingParams, length: int) -> Tensor:
    """Compute the target's joint distribution of `length` tokens after the prompt, flat, float64, prefix by prefix."""
    V = target.vocab_size
    dist = torch.ones(1, dtype=torch.float64)
    for n in range(length):
        texts = [[*prompt, *prefix] for prefix in product(range(V), repeat=n)]
        cache = target.new_cache(len(texts))
        logits = target(torch.tensor(texts), cache, scored=1).logits.double()
        histories = [History(list(prompt), text[len(prompt) :]) for text in texts]
        dist = (dist[:, None] * warp(logits, [sampling] * len(texts), histories).probs()[:, 0]).flatten()
    return dist


def p_value(dist: Tensor, texts: Tensor, V: int) -> float:
    """Return the p-value of a G-test of the texts against the distribution."""
    code = texts @ torch.tensor([V**i for i in reversed(range(texts.shape[1]))])
    return g_test(torch.bincount(code, minlength=len(dist)), dist)
