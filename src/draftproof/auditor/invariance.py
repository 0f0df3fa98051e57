"""Check seeded invariance: equal seeds give equal texts, alone or in a batch, with any draft length or drafter.

For decoders that promise it: greedy ones, and sampling ones whose text is a function of seed and target (`coupled`,
plain decoding). Rounding may change a draw that is decided by less than the rounding error; how often is bounded by the
tolerance.
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
class Difference:
    """The first difference between two runs of one seed; `near` if rounding explains it."""

    run: str
    text: int
    position: int
    emitted: int | None
    wanted: int | None
    near: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison of all runs with the first; up to `allowed` differences, beside the near ones, can be rounding."""

    runs: tuple[str, ...]
    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    allowed: int

    @property
    def holds(self) -> bool:
        return sum(not difference.near for difference in self.differences) <= self.allowed

    def __str__(self) -> str:
        lines = [f"{'the same' if self.holds else 'NOT the same'}: {self.texts} texts, {self.tokens} tokens, by"]
        lines += [f"  {run}" for run in self.runs]
        lines += [
            f"  {p.run} differs in text {p.text} at token {p.position}: {p.emitted} instead of {p.wanted}"
            + (" (within rounding)" if p.near else "")
            for p in self.differences
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
    """Continue the prompts with every decoder, as a batch and one at a time, and compare with the first run.

    decoders  by name: the same target with other draft lengths, drafters or batch sizes
    target    the model, which gives the tolerance and the margin of a greedy token
    """
    if not decoders or not prompts:
        raise ValueError(f"there is nothing to compare: {len(decoders)} decoders, {len(prompts)} prompts")
    reference = target if isinstance(target, ReferenceModel) else ReferenceModel(target)
    seeds = [seed + i for i in range(len(prompts))]
    runs: dict[str, list[Tokens]] = {}
    for name, decoder in decoders.items():
        together = decoder.decode(prompts, sampling, max_tokens=max_tokens, seeds=seeds)
        alone = [
            decoder.decode([prompt], sampling, max_tokens=max_tokens, seeds=[own])[0]
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        runs[f"{name}, together"] = [tuple(sample.tokens) for sample in together]
        runs[f"{name}, one at a time"] = [tuple(sample.tokens) for sample in alone]
    first, *others = runs
    compared = sum(len(text) for name in others for text in runs[name])
    differences = [
        _difference(name, i, texts, runs[first], reference, tuple(prompts[i]), sampling)
        for name, texts in runs.items()
        for i in range(len(prompts))
        if texts[i] != runs[first][i]
    ]
    allowed = 0 if sampling.temperature == 0 else _poisson_bound(compared * reference.tolerance(sampling), alpha)
    return Agreement(tuple(runs), len(prompts), sum(map(len, runs[first])), tuple(differences), allowed)


def _difference(
    run: str,
    i: int,
    texts: list[Tokens],
    wanted: list[Tokens],
    reference: ReferenceModel,
    prompt: Tokens,
    sampling: SamplingParams,
) -> Difference:
    one, other = texts[i], wanted[i]
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    emitted, due = (row[at] if at < len(row) else None for row in (one, other))
    near = False
    if sampling.temperature == 0 and emitted is not None and due is not None and _known(reference, *one[: at + 1], due):
        positions = Positions.of([Text(prompt, one[: at + 1])])
        scores = tilted(reference.scores(positions), positions, sampling)[-1]
        near = abs(float(scores[emitted] - scores[due])) <= 2 * math.log1p(reference.tolerance(sampling))
    return Difference(run, i, at, emitted, due, near)


def _known(reference: ReferenceModel, *tokens: int) -> bool:
    """Return whether all tokens are in the vocabulary: no rounding explains one that is not."""
    return all(0 <= token < reference.vocab_size for token in tokens)


def _poisson_bound(mean: float, alpha: float) -> int:
    """Return the count that a Poisson variable of this mean exceeds with probability below alpha."""
    term, total, count = math.exp(-mean), math.exp(-mean), 0
    while 1 - total > alpha and count < 10 * mean + 50:
        count += 1
        term *= mean / count
        total += term
    return count
