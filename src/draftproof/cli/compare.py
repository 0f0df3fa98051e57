"""Run one prompt with several drafters, side by side, and compare their speed.

Imports rich at the top, so commands import this module inside functions.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftproof.cli.console import spinner
from draftproof.cli.engines import Engines
from draftproof.cli.generate import Answer, stream_answer
from draftproof.cli.options import Choice

if TYPE_CHECKING:
    from draftproof.core.sampling import SamplingParams


def choices_to_compare(choice: Choice, hf: Any) -> dict[str, Choice]:
    """Return the choices to compare by name: plain decoding, a drafter that samples, and n-grams.

    The drafter that samples is the chosen one; if that is n-grams, it is the first half of the layers of the target
    `hf`. If no drafter is chosen, it is left out.
    """
    from draftproof.drafters.registry import meant

    chosen = None if choice.drafter is None else meant(choice.drafter, hf)
    layers = getattr(getattr(hf, "config", None), "num_hidden_layers", None)
    half = f"early-exit:{max(1, layers // 2)}" if layers else None
    names = [name for name in (chosen if chosen != "ngram" else half, "ngram") if name is not None]
    return {"plain": replace(choice, drafter=None)} | {name: replace(choice, drafter=name) for name in names}


def same_seed_if_coupled(sampling: "SamplingParams", choice: Choice) -> "SamplingParams":
    """Return sampling parameters with a seed drawn now if the rule is coupled and none is set.

    The coupled rule gives the text of plain decoding with the same seed; without one, each engine draws its own.
    """
    if choice.rule != "coupled" or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(62))


def why_texts_differ(answers: Iterable[Answer], sampling: "SamplingParams", choice: Choice) -> str:
    """Return a line that says whether the texts are equal and, if not, why that does not mean a loss of quality."""
    if len({tuple(answer.tokens) for answer in answers}) == 1:
        return "The texts are equal, token for token."
    if sampling.temperature == 0 or choice.rule == "coupled":
        return "The texts differ after two tokens that were equally likely up to rounding."
    return (
        "The texts differ because each is a different random draw from the same distribution; drafting does not change "
        "the distribution. /rule coupled gives all of them the same random numbers: they are then equal, token for "
        "token."
    )


def run_side_by_side(
    console: Console, engines: Engines, choices: Mapping[str, Choice], prompt: Any, arguments: dict[str, Any]
) -> dict[str, Answer]:
    """Answer the prompt with each choice, show texts and speeds in columns, and return the answers by name.

    The engines run one after another: at the same time they would slow each other down.
    """
    answers = {name: Answer() for name in choices}
    ready = {name: engines.get(choice) for name, choice in choices.items()}
    with spinner("Warming up"):  # the first passes allocate memory and tune kernels, which would distort the speeds
        for engine in ready.values():
            engine.generate(prompt, **{**arguments, "max_tokens": 2})
    if not console.is_terminal:
        for name in choices:
            for _ in stream_answer(ready[name], prompt, arguments, answers[name]):
                pass
        console.print(_columns(answers))
        console.print(_speeds(answers))
        return answers
    with Live(_columns(answers), console=console, refresh_per_second=4, vertical_overflow="crop") as live:
        for name in choices:
            for _ in stream_answer(ready[name], prompt, arguments, answers[name]):
                live.update(_columns(answers, running=name))
        live.update(Group(_columns(answers), _speeds(answers)))
    return answers


def _columns(answers: Mapping[str, Answer], running: str | None = None) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in answers:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(name, answer, name == running) for name, answer in answers.items()))
    return grid


def _panel(name: str, answer: Answer, running: bool) -> Panel:
    speed = f"{answer.tokens_per_second:.1f} tokens/s" if answer.tokens else "waiting"
    return Panel(Text(answer.text), title=name, subtitle=speed, border_style="cyan" if running else "bright_black")


def _speeds(answers: Mapping[str, Answer]) -> Table:
    """Return a table of speeds; speedups are relative to the first answer."""
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    for column in ("", "tokens/s", "speedup", "first token", "acceptance", "tokens per pass"):
        table.add_column(column, justify="right" if column else "left")
    for cells in _rows(answers.items()):
        table.add_row(*cells)
    return table


def _rows(answers: Iterable[tuple[str, Answer]]) -> Iterator[list[str]]:
    plain: float | None = None
    for name, answer in answers:
        speed = answer.tokens_per_second
        plain = speed if plain is None else plain
        first = "–" if answer.first_token is None else f"{answer.first_token:.2f} s"
        acceptance = f"{answer.stats.acceptance_rate:.0%}" if answer.stats.drafted else "–"
        speedup = f"{speed / plain:.2f}×" if plain else "–"
        yield [name, f"{speed:.1f}", speedup, first, acceptance, f"{answer.stats.tokens_per_pass:.2f}"]
