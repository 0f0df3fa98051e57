"""`draftproof explain`: show every round of a generation, on the terminal, as a page or as JSON."""

import json
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import screen, spinner
from draftproof.cli.engines import open_engine, sampling_for
from draftproof.cli.generate import Answer, stats_line, stream_answer
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options
from draftproof.cli.text import check_text

if TYPE_CHECKING:
    from draftproof.core.sampling import SamplingParams
    from draftproof.engine.engine import Engine
    from draftproof.explain.explanation import Explanation
    from draftproof.explain.recorder import Recorder

HELP = """Show how PROMPT is continued, round by round: which draft tokens were accepted or rejected, and why.

For every draft token you see the target's probability p, the drafter's probability q, their ratio, and the random
number ("coin") that decided. Accepted tokens are green; rejected ones are red and struck through. Each round adds one
more token after the accepted ones.

\b
Examples:
  draftproof explain "Say 'tick tock' ten times."
  draftproof explain "Why is the sky blue?" --html page.html     write a page to step through
  draftproof explain "…" --drafter ngram                         draft tokens copied from the text, so q is 1
  draftproof explain "…" --rule block                            judge the draft tokens together, not one by one

The head bundled with smollm2, like any draft model, samples its draft tokens: q is the probability it gave them. The
n-gram drafter copies its draft tokens from the text so far; nothing is sampled, so q is 1 and p/q is p.
"""


@click.command(help=HELP, short_help="Show every round of a generation, with its probabilities.")
@click.argument("prompt")
@engine_options(rule="token", rules=("token", "block"), num_draft_tokens="4")
@sampling_options()
@max_tokens_option(60)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rounds to an HTML page that needs no other files.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the rounds and all numbers as one JSON object.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
def explain(
    prompt: str,
    choice: Choice,
    sampling: dict[str, Any],
    max_tokens: int,
    html: Path | None,
    as_json: bool,
    raw: bool,
) -> None:
    from draftproof.explain.explanation import write_page
    from draftproof.explain.recorder import Recorder

    check_text(prompt, "PROMPT")
    recorder = Recorder(choice.rule)
    engine = open_engine(choice, recorder)
    if engine.tokenizer is None:
        raise ValueError(f"{choice.target} has no tokenizer, so its tokens cannot be shown as text")
    params = sampling_for(engine, sampling)
    arguments = {"sampling": params, "max_tokens": max_tokens, "chat": False if raw else None}
    explanation = generate_explanation(
        engine, prompt, arguments, recorder, describe_settings(choice, params), show=not as_json and html is None
    )
    if as_json:
        sys.stdout.write(json.dumps(explanation.as_dict(), ensure_ascii=False) + "\n")
    if html is not None:
        click.echo(f"{write_page(explanation, html)}: open it in a browser and step with the arrow keys", err=as_json)


def describe_settings(choice: Choice, sampling: "SamplingParams") -> dict[str, str]:
    """Return the settings that a page lists: the temperature, and the sampling parameters that are not off."""
    off = type(sampling)()
    names = [f.name for f in fields(sampling) if getattr(sampling, f.name) != getattr(off, f.name)]
    settings = {
        "target": choice.target,
        "drafter": choice.drafter or "none",
        "rule": choice.rule,
        "draft length": choice.num_draft_tokens,
        "temperature": sampling.temperature,
        **{name.replace("_", "-"): getattr(sampling, name) for name in names},
    }
    return {name: str(value) for name, value in settings.items()}


def generate_explanation(
    engine: "Engine",
    prompt: str,
    arguments: dict[str, Any],
    recorder: "Recorder",
    settings: dict[str, str],
    *,
    show: bool,
) -> "Explanation":
    """Generate a text and explain its rounds; `show` also prints them as they come.

    `arguments` are the keyword arguments of `Engine.stream`. The engine's rule must be `recorder`. Ctrl-C stops the
    text; the rounds until then are explained.
    """
    from draftproof.explain.explanation import Explanation

    answer = Answer()
    assert engine.tokenizer is not None
    try:
        if show:
            _show_rounds(engine, prompt, arguments, answer, recorder)
        else:
            with spinner("Generating"):
                for _ in stream_answer(engine, prompt, arguments, answer):
                    pass
    except KeyboardInterrupt:
        pass
    return Explanation(prompt, settings, recorder.rounds, answer.tokens, answer.stats, engine.tokenizer)


def _show_rounds(
    engine: "Engine", prompt: str, arguments: dict[str, Any], answer: Answer, recorder: "Recorder"
) -> None:
    from draftproof.explain.explanation import label
    from draftproof.explain.terminal import legend, show_round

    assert engine.tokenizer is not None
    console, token_label = screen(), partial(label, engine.tokenizer)
    console.print(legend())
    shown = 0
    for _ in stream_answer(engine, prompt, arguments, answer):
        for round_ in recorder.rounds[shown:]:
            shown += 1
            show_round(console, shown, round_, token_label)
    console.print()
    console.print(answer.text, markup=False, soft_wrap=True)
    console.print(stats_line(answer), style="bright_black", soft_wrap=True)
