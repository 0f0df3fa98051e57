"""`draftproof explain`: every round of a generation, on the terminal or as a page."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from draftproof.cli.console import screen, waiting
from draftproof.cli.generate import Answer, in_words, streamed
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options
from draftproof.engine.engine import Engine
from draftproof.explain.explanation import Explanation, label
from draftproof.explain.recorder import Recorder
from draftproof.explain.terminal import legend, show_round

HELP = """Show how PROMPT is continued, round by round: which guesses were kept, which were rejected, and why.

For every guessed token you see the target's probability p, the drafter's q, their ratio and the coin that decided.
Kept tokens are green, rejected ones red and struck through; each round closes with one token more.

\b
Examples:
  draftproof explain "Say 'tick tock' ten times."
  draftproof explain "Why is the sky blue?" --html page.html     a page to step through, for a class
  draftproof explain "…" --drafter ngram                         guesses copied from the text: q is 1
  draftproof explain "…" --rule block                            the draft judged as a whole

The head that comes with smollm2, like any draft model, draws its guesses: q is its own probability. The n-gram drafter
chooses them out of the text so far: nothing is drawn, so q is 1 on a guess, and p/q is just p.
"""


@click.command(help=HELP, short_help="Every round of a generation, with its coins; also as a page.")
@click.argument("prompt")
@engine_options(rule="token", rules=("token", "block"), num_draft_tokens="4")
@sampling_options()
@max_tokens_option(60)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Print all numbers as one JSON object.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
def explain(
    prompt: str,
    choice: Choice,
    sampling: dict[str, Any],
    max_tokens: int,
    html: Path | None,
    as_json: bool,
    raw: bool,
) -> None:
    from draftproof.cli.engines import open_engine
    from draftproof.explain.recorder import Recorder

    recorder = Recorder(choice.rule)
    engine = open_engine(choice, recorder)
    if engine.tokenizer is None:
        raise ValueError(f"{choice.target} has no tokenizer, and without one there is no text to explain")
    options = {**sampling, "max_tokens": max_tokens, "chat": False if raw else None}
    made = explained(
        engine, prompt, options, recorder, settings_of(choice, sampling), show=not as_json and html is None
    )
    if as_json:
        sys.stdout.write(json.dumps(made.as_dict(), ensure_ascii=False) + "\n")
    if html is not None:
        from draftproof.explain.explanation import write_page

        click.echo(f"{write_page(made, html)}: open it in a browser, and step with the arrow keys", err=as_json)


def settings_of(choice: Choice, sampling: dict[str, Any]) -> dict[str, str]:
    """What was asked for, as a page shows it."""
    asked = {
        "target": choice.target,
        "drafter": choice.drafter or "none",
        "rule": choice.rule,
        "draft length": choice.num_draft_tokens,
        **{name.replace("_", "-"): value for name, value in sampling.items() if value not in (None, 0.0, 1.0)},
        "temperature": sampling["temperature"],
    }
    return {name: str(value) for name, value in asked.items()}


def explained(
    engine: Engine, prompt: str, options: dict[str, Any], recorder: Recorder, settings: dict[str, str], *, show: bool
) -> Explanation:
    """Generate and explain. Ctrl-C ends the text; the rounds that were made are explained."""
    made = Answer()
    assert engine.tokenizer is not None
    try:
        if show:
            _shown(engine, prompt, options, made, recorder)
        else:
            with waiting("Generating"):
                for _ in streamed(engine, prompt, options, made):
                    pass
    except KeyboardInterrupt:
        pass
    return Explanation(prompt, settings, recorder.rounds, made.tokens, made.stats, engine.tokenizer)


def _shown(engine: Engine, prompt: str, options: dict[str, Any], made: Answer, recorder: Recorder) -> None:
    assert engine.tokenizer is not None
    console, words = screen(), partial(label, engine.tokenizer)
    console.print(legend())
    done = 0
    for _ in streamed(engine, prompt, options, made):
        for round_ in recorder.rounds[done:]:
            done += 1
            show_round(console, done, round_, words)
    console.print()
    console.print(made.text, markup=False, soft_wrap=True)
    console.print(in_words(made), style="bright_black", soft_wrap=True)
