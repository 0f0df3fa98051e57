"""From runs to figures: speeds, speedups with their spread, acceptance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from draftproof.bench.measure import PLAIN, Run


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles over prompts."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(low, middle, high)


@dataclass(frozen=True, slots=True)
class Figures:
    """A contestant's figures over some prompts. `same` counts the prompts it answered with plain decoding's tokens."""

    contestant: str
    prompts: int
    tokens_per_second: float
    speedup: Spread | None
    acceptance_length: float | None
    tokens_per_pass: float | None
    first_token: float | None
    same: int


def kinds_of(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.kind for run in runs))


def summarise(runs: Sequence[Run], kind: str | None = None) -> list[Figures]:
    """A line a contestant, for one kind of prompts or for all; the plain one first, as far as runs go."""
    chosen = [run for run in runs if kind is None or run.kind == kind]
    names = dict.fromkeys([PLAIN, *sorted({run.contestant for run in chosen})])
    plain = [run for run in chosen if run.contestant == PLAIN]
    groups = {name: [run for run in chosen if run.contestant == name] for name in names}
    return [_figures(name, group, plain) for name, group in groups.items() if group]


def rates(runs: Iterable[Run]) -> dict[str, float]:
    """Tokens a second for each prompt, the median of its repeats."""
    by_prompt: dict[str, list[float]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run.tokens / run.seconds)
    return {prompt: median(each) for prompt, each in by_prompt.items()}


def ratios(of: dict[str, float], to: dict[str, float]) -> list[float]:
    """Prompt by prompt, where both have been measured."""
    return [rate / to[prompt] for prompt, rate in of.items() if to.get(prompt)]


def _figures(name: str, runs: list[Run], plain: list[Run]) -> Figures:
    first = [run.first_token for run in runs if run.first_token is not None]
    said = {(run.prompt, run.repeat): run.digest for run in plain}
    return Figures(
        contestant=name,
        prompts=len({run.prompt for run in runs}),
        tokens_per_second=sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
        speedup=Spread.of(ratios(rates(runs), rates(plain))),
        acceptance_length=_acceptance_length(runs),
        tokens_per_pass=_tokens_per_pass(runs),
        first_token=median(first) if first else None,
        same=len({run.prompt for run in runs if said.get((run.prompt, run.repeat)) == run.digest}),
    )


def _acceptance_length(runs: list[Run]) -> float | None:
    """1 + accepted tokens a draft. None where nobody counted, or nothing was drafted."""
    drafts = sum(run.drafts or 0 for run in runs)
    return 1 + sum(run.accepted or 0 for run in runs) / drafts if drafts else None


def _tokens_per_pass(runs: list[Run]) -> float | None:
    passes = sum(run.passes or 0 for run in runs)
    return sum(run.tokens for run in runs) / passes if passes else None
