"""`draftproof demo`: show what speculative decoding does, on this machine, in about a minute."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from draftproof.cli.console import screen
from draftproof.cli.engines import Engines
from draftproof.cli.explain import describe_settings, generate_explanation
from draftproof.cli.generate import Answer
from draftproof.cli.options import Choice, target_option

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.explain.explanation import Explanation
    from draftproof.explain.recorder import Round

HELP = """Answer two prompts with plain and with speculative decoding, side by side, then explain one round.

Also writes a page that shows every round of an answer (demo/explain.html) and suggests what to try next.
"""


@click.command(help=HELP, short_help="See plain and speculative decoding side by side.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo"), show_default=True,
    help="Folder to write the page to.",
)  # fmt: skip
@target_option()
@click.option(
    "--max-tokens", "-n", type=click.IntRange(1), default=160, show_default=True, help="Maximum tokens per answer."
)
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
DRAFTERS_IN_WORDS: Final = {
    "head": "The drafter is a small head, trained on the model's own hidden states. It samples draft tokens from its "
    "own distribution, and verification corrects every difference from the model's distribution.",
    "suffix+head": "Where the text repeats itself, draft tokens are copied. Elsewhere a small head, trained on the "
    "model's own hidden states, samples them from its own distribution, and verification corrects every difference.",
    "ngram": "The drafter looks up what followed the last few tokens earlier in the text. Where a text repeats "
    "nothing it rarely drafts, and the speed is that of plain decoding.",
}
"""Drafters that "auto" may choose as the demo's drafter, described for a newcomer."""

NEXT_STEPS: Final = (
    'draftproof generate "Why is the sky blue?" --stats     or with your own models: --target … --draft-model …',
    "draftproof chat     then type /compare on and /rounds on; /help lists all commands",
)


def show(out: Path, target: str, max_tokens: int) -> None:
    """Run the demo: two comparisons, one round explained, and what to try next."""
    console = screen()
    engines = Engines()
    choice = Choice(target, rule="token")
    hf = engines.get(choice).loaded
    from draftproof.drafters.registry import (
        meant,
    )  # not before: importing torch takes seconds, and `get` shows a spinner
    from draftproof.explain.explanation import write_page

    drafter = meant("auto", hf)
    console.rule("1 · plain and speculative decoding of the same prompts")
    console.print(DRAFTERS_IN_WORDS[drafter], style="bright_black")
    for title, prompt in (("a question", QUESTION), ("a small edit of a file", EDIT)):
        console.print(f"\n{title}:", style="bold")
        _compare(console, engines, {"plain": replace(choice, drafter=None), drafter: choice}, prompt, max_tokens)
    console.rule("2 · one round explained")
    explanation = _explanation(engines, choice, max_tokens)
    _explain_one(console, explanation)
    page = write_page(explanation, out / "explain.html")
    console.rule("3 · what to try next")
    console.print(f"Open this page to step through all rounds with the arrow keys: [bold]{page}[/bold]")
    for line in NEXT_STEPS:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _compare(console: "Console", engines: Engines, choices: dict[str, Choice], prompt: str, max_tokens: int) -> None:
    from draftproof.cli.compare import run_side_by_side

    greedy = {"temperature": 0.0, "max_tokens": max_tokens}
    plain, fast = run_side_by_side(console, engines, choices, prompt, greedy).values()
    if not plain.tokens_per_second:
        return
    speedup = fast.tokens_per_second / plain.tokens_per_second
    console.print(_summary(plain, fast, speedup), style="bold", soft_wrap=True)


def _summary(plain: Answer, fast: Answer, speedup: float) -> str:
    speeds = f"{plain.tokens_per_second:.1f} and {fast.tokens_per_second:.1f} tokens/s ({speedup:.2f}×)"
    stats = fast.stats
    accepted = f"{stats.acceptance_rate:.0%} of the draft tokens accepted, {stats.tokens_per_pass:.2f} tokens per pass"
    same = (
        "the same text, token for token"
        if plain.tokens == fast.tokens
        else "the texts differ after two tokens that were equally likely up to rounding"
    )
    return f"{speeds}: {accepted}; {same}."


def _explanation(engines: Engines, choice: Choice, max_tokens: int) -> "Explanation":
    """Explain a sampled answer: at temperature 0 the coins would decide nothing."""
    from draftproof.core.sampling import SamplingParams
    from draftproof.explain.recorder import Recorder

    recorder = Recorder(choice.rule)
    sampling = SamplingParams(temperature=0.7, seed=7)
    arguments = {"sampling": sampling, "max_tokens": min(max_tokens, 80)}
    return generate_explanation(
        engines.get(choice, recorder), QUESTION, arguments, recorder, describe_settings(choice, sampling), show=False
    )


def _explain_one(console: "Console", explanation: "Explanation") -> None:
    from draftproof.explain.story import about_closing, about_slot
    from draftproof.explain.terminal import legend, show_round

    number, round_ = _most_instructive(explanation.rounds)
    console.print(legend())
    show_round(console, number + 1, round_, explanation.label)
    at = min(round_.kept, len(round_.slots) - 1)
    stories = [about_slot(round_, at, explanation.name)] if round_.slots else []
    closing = about_closing(round_, explanation.name)
    for words in (*(story.happened for story in stories), closing.happened, closing.why):
        console.print(words, markup=False)


def _most_instructive(rounds: "list[Round]") -> "tuple[int, Round]":
    """Return the round to explain: preferably a rejection that was not certain, after many accepted tokens."""

    def interest(item: "tuple[int, Round]") -> tuple[bool, bool, int]:
        round_ = item[1]
        rejected = round_.kept < len(round_.slots)
        uncertain = rejected and 0.02 < round_.slots[round_.kept].chance < 0.98
        return (uncertain, rejected, round_.kept)

    return max(enumerate(rounds), key=interest)
