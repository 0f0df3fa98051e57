"""`draftproof demo`: what speculative decoding is and does, in a minute, on your own machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from draftproof.cli import compare as contest
from draftproof.cli.console import screen
from draftproof.cli.engines import Engines
from draftproof.cli.explain import explained, settings_of
from draftproof.cli.generate import Answer
from draftproof.cli.options import Choice
from draftproof.drafters.registry import meant
from draftproof.explain.explanation import Explanation, write_page
from draftproof.explain.recorder import Recorder, Round
from draftproof.explain.story import about_closing, about_slot
from draftproof.explain.terminal import legend, show_round

HELP = """Answer two prompts with plain and with speculative decoding, side by side; then explain one round.

Writes a page to step through (demo/explain.html) and says what to try next.
"""


@click.command(help=HELP, short_help="Plain and speculative side by side, and one round explained.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo"), show_default=True)
@click.option("--target", metavar="MODEL", default="smollm2", show_default=True, help="smollm2, a folder or a hub id.")
@click.option("--max-tokens", "-n", type=click.IntRange(1), default=160, show_default=True, help="Most tokens to say.")
def demo(out: Path, target: str, max_tokens: int) -> None:

    show(out, target, max_tokens)


QUESTION: Final = "What should I pack for a weekend in the mountains?"
EDIT: Final = '''Rename the function `area` to `rectangle_area` in this file. Give back the full file.

```python
"""Shapes on a grid."""

import math


def area(width, height):
    """The area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    """The length of the border of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)


def circle(radius):
    """The area of a circle."""
    if radius < 0:
        raise ValueError("radius must not be negative")
    return math.pi * radius ** 2
```'''
WHY: Final = {
    "head": "The drafter is a small head, trained on the model's own hidden states: it draws its guesses from a distribution of "
    "its own, and the verification makes up for every difference to the model's.",
    "suffix+head": "Where the text repeats itself it is copied; elsewhere a small head, trained on the model's own "
    "hidden states, draws guesses from a distribution of its own, and the verification makes up for every difference.",
    "ngram": "The drafter looks up what followed the last few tokens before. Where a text repeats nothing it guesses "
    "seldom, and the speed is that of plain decoding.",
}
NEXT: Final = (
    'draftproof generate "Why is the sky blue?" --stats     or, with models of yours: --target … --draft-model …',
    "draftproof chat     then /compare on and /rounds on; /help lists the rest",
)


def show(out: Path, target: str, max_tokens: int) -> None:
    """All scenes, one after another."""
    console = screen()
    engines = Engines()
    choice = Choice(target, rule="token")
    drafter = meant("auto", engines.of(choice).hf)
    console.rule("1 · the same text, two ways")
    console.print(WHY[drafter], style="bright_black")
    for about, prompt in (("a question", QUESTION), ("a small edit of a file", EDIT)):
        console.print(f"\n{about}:", style="bold")
        _race(console, engines, {"plain": replace(choice, drafter=None), drafter: choice}, prompt, max_tokens)
    console.rule("2 · one round explained")
    explanation = _explained(engines, choice, max_tokens)
    _explain_one(console, explanation)
    page = write_page(explanation, out / "explain.html")
    console.rule("3 · what next")
    console.print(f"All rounds, to step through with the arrow keys: [bold]{page}[/bold]")
    for line in NEXT:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _race(console: Console, engines: Engines, ways: dict[str, Choice], prompt: str, max_tokens: int) -> None:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    plain, fast = contest.run(console, engines, ways, prompt, greedy).values()
    if not plain.tokens_per_second:
        return
    gain = fast.tokens_per_second / plain.tokens_per_second
    console.print(_verdict(plain, fast, gain), style="bold", soft_wrap=True)


def _verdict(plain: Answer, fast: Answer, gain: float) -> str:
    speeds = f"{plain.tokens_per_second:.1f} and {fast.tokens_per_second:.1f} tokens a second ({gain:.2f}×)"
    kept = f"{fast.stats.acceptance_rate:.0%} of the guesses kept, {fast.stats.tokens_per_pass:.2f} tokens a pass"
    same = "the same text, token for token" if plain.tokens == fast.tokens else "texts that part at a rounding tie"
    return f"{speeds}: {kept}; {same}."


def _explained(engines: Engines, choice: Choice, max_tokens: int) -> Explanation:
    """Sampled this time: at temperature 0 the coins have nothing to decide."""
    recorder = Recorder(choice.rule)
    sampling: dict[str, Any] = {"temperature": 0.7, "seed": 7}
    options = {**sampling, "max_tokens": min(max_tokens, 80)}
    return explained(
        engines.of(choice, recorder), QUESTION, options, recorder, settings_of(choice, sampling), show=False
    )


def _explain_one(console: Console, explanation: Explanation) -> None:
    number, round_ = _telling(explanation.rounds)
    console.print(legend())
    show_round(console, number + 1, round_, explanation.label)
    at = min(round_.kept, len(round_.slots) - 1)
    stories = [about_slot(round_, at, explanation.name)] if round_.slots else []
    closing = about_closing(round_, explanation.name)
    for words in (*(story.happened for story in stories), closing.happened, closing.why):
        console.print(words, markup=False)


def _telling(rounds: list[Round]) -> tuple[int, Round]:
    """The round with most to see: a guess rejected by a coin that could have fallen otherwise, others kept before."""

    def interest(item: tuple[int, Round]) -> tuple[bool, bool, int]:
        round_ = item[1]
        missed = round_.kept < len(round_.slots)
        close = missed and 0.02 < round_.slots[round_.kept].chance < 0.98
        return (close, missed, round_.kept)

    return max(enumerate(rounds), key=interest)
