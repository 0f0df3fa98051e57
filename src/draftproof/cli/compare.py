"""One prompt, several ways, side by side: the same distribution each time, at different speeds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftproof.cli.console import waiting
from draftproof.cli.engines import Engines
from draftproof.cli.generate import Answer, streamed
from draftproof.cli.options import Choice
from draftproof.drafters.registry import meant


def contestants(choice: Choice, hf: Any) -> dict[str, Choice]:
    """Plain decoding, a drafter that draws, n-grams; `hf` is the target.

    The chosen drafter draws; where that is n-grams or nobody, half of the target's own layers do.
    """
    chosen = None if choice.drafter is None else meant(choice.drafter, hf)
    layers = layers_of(hf)
    half = f"early-exit:{max(1, layers // 2)}" if layers else None
    names = [name for name in (chosen if chosen != "ngram" else half, "ngram") if name is not None]
    return {"plain": replace(choice, drafter=None)} | {name: replace(choice, drafter=name) for name in names}


def layers_of(hf: Any) -> int | None:
    return getattr(getattr(hf, "config", None), "num_hidden_layers", None)


def run(
    console: Console, engines: Engines, ways: Mapping[str, Choice], prompt: Any, options: dict[str, Any]
) -> dict[str, Answer]:
    """Each in turn, for they would slow each other down; the columns fill as they speak."""
    answers = {name: Answer() for name in ways}
    ready = {name: engines.of(choice) for name, choice in ways.items()}
    with waiting("Warming up"):  # the first passes of a process allocate and tune: nobody's speed
        for engine in ready.values():
            engine.generate(prompt, **{**options, "max_tokens": 2})
    if not console.is_terminal:
        for name in ways:
            for _ in streamed(ready[name], prompt, options, answers[name]):
                pass
        console.print(_columns(answers))
        console.print(table(answers))
        return answers
    with Live(_columns(answers), console=console, refresh_per_second=4, vertical_overflow="crop") as live:
        for name in ways:
            for _ in streamed(ready[name], prompt, options, answers[name]):
                live.update(_columns(answers, now=name))
        live.update(Group(_columns(answers), table(answers)))
    return answers


def _columns(answers: Mapping[str, Answer], now: str | None = None) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in answers:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(name, made, name == now) for name, made in answers.items()))
    return grid


def _panel(name: str, made: Answer, speaking: bool) -> Panel:
    speed = f"{made.tokens_per_second:.1f} tokens/s" if made.tokens else "waiting"
    return Panel(Text(made.text), title=name, subtitle=speed, border_style="cyan" if speaking else "bright_black")


def table(answers: Mapping[str, Answer]) -> Table:
    """The figures. The speedup is against the first."""
    shown = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for column in ("", "tokens/s", "speedup", "first token", "acceptance", "tokens a pass"):
        shown.add_column(column, justify="right" if column else "left")
    for cells in _rows(answers.items()):
        shown.add_row(*cells)
    return shown


def _rows(answers: Iterable[tuple[str, Answer]]) -> Iterator[list[str]]:
    plain: float | None = None
    for name, made in answers:
        speed = made.tokens_per_second
        plain = speed if plain is None else plain
        first = "–" if made.first_token is None else f"{made.first_token:.2f} s"
        kept = f"{made.stats.acceptance_rate:.0%}" if made.stats.drafted else "–"
        gain = f"{speed / plain:.2f}×" if plain else "–"
        yield [name, f"{speed:.1f}", gain, first, kept, f"{made.stats.tokens_per_pass:.2f}"]
