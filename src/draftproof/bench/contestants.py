"""Who is measured: this library's engine with its drafters and rules."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof.bench.measure import PLAIN, Said
from draftproof.core.sampling import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load


@dataclass(frozen=True, slots=True)
class Ours:
    """An engine. The time to its first token is that of the first round, the prompt counted."""

    name: str
    engine: Engine

    def __call__(self, tokens: list[int], max_tokens: int, sampling: Sampling) -> Said:
        start, first, said = time.perf_counter(), None, list[int]()
        if sampling.temperature == 0:
            sampling = replace(sampling, seed=None)  # a seed would keep the pace from following measured costs
        stats = None
        for chunk in self.engine.stream(tokens, sampling, max_tokens=max_tokens):
            first = time.perf_counter() - start if first is None else first
            said += chunk.tokens
            stats = chunk.stats
        if stats is None:
            return Said(said, first)
        return Said(said, first, stats.rounds, stats.drafts, stats.drafted, stats.accepted)


def ours(
    plain: Engine, drafters: Sequence[tuple[str, Any]], rules: Sequence[str], draft_length: int | str
) -> list[Ours]:
    """Plain decoding, then every drafter (its name, and what `load` takes) under every rule, around one target."""
    made = [Ours(PLAIN, plain)]
    for name, drafter in drafters:
        for rule in rules:
            engine = load(plain.hf, drafter, rule=rule, num_draft_tokens=draft_length, tokenizer=plain.tokenizer)
            made.append(Ours(name if len(rules) == 1 else f"{name}/{rule}", engine))
    return made
