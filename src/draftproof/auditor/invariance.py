"""Seeded invariance: the same seeds give the same texts, alone or in company, with another draft length or drafter.

For decoders that promise it: greedy ones, and sampling ones whose text is a function of seed and target (`coupled`,
plain decoding). Rounding may turn a draw that is decided by less than it; how often is bounded by the tolerance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.auditor.interface import Decoder
from draftproof.auditor.reference import ReferenceModel, tilted
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs of one seed part: which run, which text, at which token; `near` if rounding explains it."""

    run: str
    text: int
    position: int
    said: int | None
    wanted: int | None
    near: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether all runs said the same. So many partings as `allowed` can be rounding's; near ones are not counted."""

    runs: tuple[str, ...]
    texts: int
    tokens: int
    partings: tuple[Parting, ...]
    allowed: int

    @property
    def holds(self) -> bool:
        return sum(not parting.near for parting in self.partings) <= self.allowed

    def __str__(self) -> str:
        lines = [f"{'the same' if self.holds else 'NOT the same'}: {self.texts} texts, {self.tokens} tokens, by"]
        lines += [f"  {run}" for run in self.runs]
        lines += [
            f"  {p.run} parts in text {p.text} at token {p.position}: {p.said} for {p.wanted}"
            + (" (within rounding)" if p.near else "")
            for p in self.partings
        ]
        return "\n".join(lines)


def agreement(
    decoders: Mapping[str, Decoder],
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_tokens: int = 64,
    seed: int = 0,
    alpha: float = 1e-6,
) -> Agreement:
    """Let every decoder continue the prompts, all together and one at a time, and compare with the first one's texts.

    decoders  by name: the same target with other draft lengths, drafters, batches
    target    the model, for the margin of a greedy token and the tolerance
    """
    if not decoders or not prompts:
        raise ValueError(f"there is nothing to compare: {len(decoders)} decoders, {len(prompts)} prompts")
    teacher = target if isinstance(target, ReferenceModel) else ReferenceModel(target)
    seeds = [seed + i for i in range(len(prompts))]
    runs: dict[str, list[Tokens]] = {}
    for name, decoder in decoders.items():
        together = decoder.decode(prompts, sampling, max_tokens=max_tokens, seeds=seeds)
        alone = [
            decoder.decode([prompt], sampling, max_tokens=max_tokens, seeds=[own])[0]
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        runs[f"{name}, together"] = [tuple(said.tokens) for said in together]
        runs[f"{name}, one at a time"] = [tuple(said.tokens) for said in alone]
    first, *others = runs
    compared = sum(len(text) for name in others for text in runs[name])
    partings = [
        _parting(name, i, texts, runs[first], teacher, tuple(prompts[i]), sampling)
        for name, texts in runs.items()
        for i in range(len(prompts))
        if texts[i] != runs[first][i]
    ]
    allowed = 0 if sampling.temperature == 0 else _most(compared * teacher.tolerance(sampling), alpha)
    return Agreement(tuple(runs), len(prompts), sum(map(len, runs[first])), tuple(partings), allowed)


def _parting(
    run: str,
    i: int,
    texts: list[Tokens],
    wanted: list[Tokens],
    teacher: ReferenceModel,
    prompt: Tokens,
    sampling: SamplingParams,
) -> Parting:
    one, other = texts[i], wanted[i]
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    said, due = (row[at] if at < len(row) else None for row in (one, other))
    near = False
    if sampling.temperature == 0 and said is not None and due is not None:
        positions = Positions.of([Text(prompt, one[: at + 1])])
        scores = tilted(teacher.scores(positions), positions, sampling)[-1]
        near = abs(float(scores[said] - scores[due])) <= 2 * math.log1p(teacher.tolerance(sampling))
    return Parting(run, i, at, said, due, near)


def _most(mean: float, alpha: float) -> int:
    """What a Poisson count of this mean exceeds with a chance below alpha."""
    term, total, count = math.exp(-mean), math.exp(-mean), 0
    while 1 - total > alpha and count < 10 * mean + 50:
        count += 1
        term *= mean / count
        total += term
    return count
