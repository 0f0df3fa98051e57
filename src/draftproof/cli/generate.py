"""`draftproof generate`: one prompt, streamed as it comes, or a file of prompts."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine

HELP = """Continue PROMPT, or what comes on stdin, and stream the text as it is made.

\b
Examples:
  draftproof generate "Why is the sky blue?"
  draftproof generate "Write a haiku" --temperature 0.9 --seed 7 --stats
  cat notes.txt | draftproof generate --max-tokens 100
  draftproof generate "…" --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B
  draftproof generate "…" --rule coupled --seed 7       the text of --drafter none --seed 7, faster
  draftproof generate --prompts prompts.jsonl > answers.jsonl

A line of a --prompts file is a JSON string, or an object with "prompt" (text, or chat messages) and what else it
should carry into its result.

Ctrl-C ends the text and keeps what was said. With --json the result is one JSON object.
"""


@click.command(help=HELP, short_help="Continue a prompt, streaming; or a file of prompts.")
@click.argument("prompt", required=False)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file of prompts.")
@engine_options()
@sampling_options()
@max_tokens_option(256)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times.")
@click.option("--num-beams", type=click.IntRange(1), default=1, help="Beam search, which does not sample or draft.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Tell on stderr how fast it was and how much was kept.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object at the end instead of text on the way.")
def generate(
    prompt: str | None, prompts: Path | None, choice: Choice, stats: bool, as_json: bool, raw: bool, **how: Any
) -> int:
    options = {**how.pop("sampling"), **how, "stop": list(how["stop"]), "chat": False if raw else None}
    if prompts is not None:
        if prompt is not None:
            raise click.UsageError("give PROMPT or --prompts, not both")
        from draftproof.cli.batch import answer_all, read_prompts

        items = read_prompts(prompts)
        return answer_all(_opened(choice), items, options, stats=stats)
    text = _text(prompt)
    engine = _opened(choice)
    from draftproof.cli.streaming import answer

    return answer(engine, text, options, stats=stats, as_json=as_json)


def _text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('nothing to continue: draftproof generate "Why is the sky blue?", or text on stdin')
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise click.UsageError("stdin is empty: give a prompt as an argument or on stdin")
    return text


def _opened(choice: Choice) -> "Engine":
    from draftproof.cli.opening import open_engine

    return open_engine(choice)
