"""Benchmark figures as tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from draftproof.bench.measure import Run
from draftproof.bench.summary import Figures, Spread, kinds_of, rates, ratios, summarise

COLUMNS = ("", "tokens/s", "speedup", "(quartiles)", "acc. length", "tokens/pass", "first token", "same text")


def table(runs: Sequence[Run], greedy: bool) -> Table:
    """All prompts, then kind by kind. `greedy`: only then is a different text a surprise."""
    shown = _empty(COLUMNS if greedy else COLUMNS[:-1])
    kinds = kinds_of(runs)
    for kind in (None, *(kinds if len(kinds) > 1 else ())):
        figures = summarise(runs, kind)
        prompts = max((f.prompts for f in figures), default=0)
        shown.add_row(f"[bold]{kind or 'all prompts'}[/bold] ({prompts})")
        for one in figures:
            shown.add_row(*_cells(one)[: len(shown.columns)])
        shown.add_section()
    return shown


def comparison(before: Sequence[Run], after: Sequence[Run]) -> Table:
    """The contestants that two files share: how their speed changed, prompt by prompt."""
    shown = _empty(("", "tokens/s before", "after", "change", "(quartiles)", "prompts"))
    one, other = ({f.contestant: f for f in summarise(runs)} for runs in (before, after))
    for name in one:
        if name not in other:
            continue
        changes = ratios(
            rates(r for r in after if r.contestant == name), rates(r for r in before if r.contestant == name)
        )
        middle, quartiles = _spread(Spread.of(changes))
        speeds = (f"{one[name].tokens_per_second:.1f}", f"{other[name].tokens_per_second:.1f}")
        shown.add_row(name, *speeds, middle, quartiles, str(len(changes)))
    return shown


def _empty(columns: Sequence[str]) -> Table:
    made = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    return made


def _cells(figures: Figures) -> list[str]:
    middle, quartiles = _spread(figures.speedup)
    return [
        f"  {figures.contestant}",
        f"{figures.tokens_per_second:.1f}",
        middle,
        quartiles,
        _number(figures.acceptance_length),
        _number(figures.tokens_per_pass),
        "–" if figures.first_token is None else f"{figures.first_token:.2f} s",
        f"{figures.same}/{figures.prompts}",
    ]


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "–", ""
    return f"{spread.middle:.2f}×", f"({spread.low:.2f}–{spread.high:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
