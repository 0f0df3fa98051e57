"""Report the runs of a benchmark: figures per decoder, as a table, a comparison, a plot, or a results file."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import torch
from rich.table import Table

import draftproof
from draftproof.bench.measure import PLAIN, Run

COLUMNS: Final = ("", "tokens/s", "speedup", "(quartiles)", "acc. length", "tokens/pass", "first token", "same text")
COLOURS: Final = ("#2b5fd9", "#0b7a5b", "#d9771a", "#6a3fb5", "#c02f3f", "#5d6573", "#0d8ca8", "#a8871a")


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
    """A decoder's figures over some prompts. `same` counts the prompts answered with plain decoding's tokens."""

    contestant: str
    prompts: int
    tokens_per_second: float
    speedup: Spread | None
    acceptance_length: float | None
    tokens_per_pass: float | None
    first_token: float | None
    same: int


def summarise(runs: Sequence[Run], kind: str | None = None) -> list[Figures]:
    """Return the figures of every decoder, plain decoding first, over one kind of prompts or over all."""
    chosen = [run for run in runs if kind is None or run.kind == kind]
    names = dict.fromkeys([PLAIN, *sorted({run.contestant for run in chosen})])
    plain = [run for run in chosen if run.contestant == PLAIN]
    groups = {name: [run for run in chosen if run.contestant == name] for name in names}
    return [_figures(name, group, plain) for name, group in groups.items() if group]


def _figures(name: str, runs: list[Run], plain: list[Run]) -> Figures:
    first = [run.first_token for run in runs if run.first_token is not None]
    plain_digests = {(run.prompt, run.repeat): run.digest for run in plain}
    return Figures(
        contestant=name,
        prompts=len({run.prompt for run in runs}),
        tokens_per_second=sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
        speedup=Spread.of(_ratios(_rates(runs), _rates(plain))),
        acceptance_length=_acceptance_length(runs),
        tokens_per_pass=_tokens_per_pass(runs),
        first_token=median(first) if first else None,
        same=len({run.prompt for run in runs if plain_digests.get((run.prompt, run.repeat)) == run.digest}),
    )


def _rates(runs: Iterable[Run]) -> dict[str, float]:
    """Return tokens per second for each prompt: the median of its repeats."""
    by_prompt: dict[str, list[float]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run.tokens / run.seconds)
    return {prompt: median(rates) for prompt, rates in by_prompt.items()}


def _ratios(rates: dict[str, float], baseline: dict[str, float]) -> list[float]:
    """Return the ratio for each prompt that both have."""
    return [rate / baseline[prompt] for prompt, rate in rates.items() if baseline.get(prompt)]


def _acceptance_length(runs: list[Run]) -> float | None:
    """Return 1 + accepted tokens per draft; None if nothing was drafted or counted."""
    drafts = sum(run.drafts or 0 for run in runs)
    return 1 + sum(run.accepted or 0 for run in runs) / drafts if drafts else None


def _tokens_per_pass(runs: list[Run]) -> float | None:
    passes = sum(run.passes or 0 for run in runs)
    return sum(run.tokens for run in runs) / passes if passes else None


def _kinds(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.kind for run in runs))


def table(runs: Sequence[Run], greedy: bool) -> Table:
    """Make a table over all prompts, then kind by kind. Only `greedy` texts are expected to be the same."""
    made = _empty_table(COLUMNS if greedy else COLUMNS[:-1])
    kinds = _kinds(runs)
    for kind in (None, *(kinds if len(kinds) > 1 else ())):
        figures = summarise(runs, kind)
        prompts = max((f.prompts for f in figures), default=0)
        made.add_row(f"[bold]{kind or 'all prompts'}[/bold] ({prompts})")
        for one in figures:
            made.add_row(*_cells(one)[: len(made.columns)])
        made.add_section()
    return made


def comparison(before: Sequence[Run], after: Sequence[Run]) -> Table:
    """Make a table of how the speed changed, prompt by prompt, for the decoders that both results have."""
    made = _empty_table(("", "tokens/s before", "after", "change", "(quartiles)", "prompts"))
    one, other = ({f.contestant: f for f in summarise(runs)} for runs in (before, after))
    for name in one:
        if name not in other:
            continue
        changes = _ratios(
            _rates(r for r in after if r.contestant == name), _rates(r for r in before if r.contestant == name)
        )
        middle, quartiles = _spread_cells(Spread.of(changes))
        speeds = (f"{one[name].tokens_per_second:.1f}", f"{other[name].tokens_per_second:.1f}")
        made.add_row(name, *speeds, middle, quartiles, str(len(changes)))
    return made


def _empty_table(columns: Sequence[str]) -> Table:
    made = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    return made


def _cells(figures: Figures) -> list[str]:
    middle, quartiles = _spread_cells(figures.speedup)
    return [
        f"  {figures.contestant}",
        f"{figures.tokens_per_second:.1f}",
        middle,
        quartiles,
        _number_cell(figures.acceptance_length),
        _number_cell(figures.tokens_per_pass),
        "–" if figures.first_token is None else f"{figures.first_token:.2f} s",
        f"{figures.same}/{figures.prompts}",
    ]


def _spread_cells(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "–", ""
    return f"{spread.middle:.2f}×", f"({spread.low:.2f}–{spread.high:.2f})"


def _number_cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot the speedups over plain decoding: a group of bars per kind, a bar per decoder, quartiles as whiskers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'draftproof[plot]'") from None

    kinds = _kinds(runs)
    groups = {kind: {f.contestant: f for f in summarise(runs, kind)} for kind in kinds}
    names = [f.contestant for f in summarise(runs) if f.contestant != PLAIN]
    figure = Figure(figsize=(max(6.0, 1.7 * len(kinds) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        found = [(i, groups[kind].get(name)) for i, kind in enumerate(kinds)]
        bars = [(i - 0.4 + (n + 0.5) * width, f) for i, f in found if f is not None and f.speedup is not None]
        _plot_bars(axes, bars, width * 0.92, name, COLOURS[n % len(COLOURS)])
    axes.axhline(1, color="#1d2129", linewidth=1)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("speedup over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, dpi=150)


def _plot_bars(axes: "object", bars: list[tuple[float, Figures]], width: float, name: str, colour: str) -> None:
    spreads = [figures.speedup for _, figures in bars if figures.speedup is not None]
    middle = [s.middle for s in spreads]
    whiskers = [[s.middle - s.low for s in spreads], [s.high - s.middle for s in spreads]]
    xs = [x for x, _ in bars]
    axes.bar(xs, middle, width, yerr=whiskers, label=name, color=colour, ecolor="#5d6573", capsize=2)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Results:
    """The contents of a results file."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    runs: list[Run]

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"


def read_results(path: Path) -> Results:
    """Read a results file, as `draftproof bench --save` and `--json` write it."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Results(saved["settings"], saved["machine"], [Run(**run) for run in saved["runs"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of `draftproof bench --json` ({type(error).__name__})") from None


def differences(one: Results, other: Results) -> Sequence[str]:
    """List the settings and machine properties in which two results differ, one line each."""
    lines = []
    for part in ("settings", "machine"):
        a, b = getattr(one, part), getattr(other, part)
        lines += [f"{key}: {a.get(key)} → {b.get(key)}" for key in {**a, **b} if a.get(key) != b.get(key)]
    return lines


def machine() -> dict[str, Any]:
    """Return the versions and hardware that a speed depends on."""
    return {
        "draftproof": draftproof.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
