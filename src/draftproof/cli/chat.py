"""`draftproof chat`: a conversation in the terminal, with the engine's settings at hand."""

from pathlib import Path
from typing import Any

import click

from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options

HELP = """Talk to a model, and switch drafter, rule and sampling while you do.

The up key brings back what you wrote, Tab completes commands, Ctrl-C ends an answer and keeps what was said, Ctrl-D
leaves. Lines that begin with a slash are commands; /help lists them.

\b
Examples:
  draftproof chat
  draftproof chat --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B
  draftproof chat --load yesterday.json
\b
Once inside:
  /compare on          every prompt runs plain, speculative and n-gram, side by side
  /rounds on           after every answer, which guesses were kept
  /drafter suffix      another drafter, at once
"""


@click.command(help=HELP, short_help="A conversation; switch drafter, rule and sampling as you go.")
@engine_options()
@sampling_options()
@max_tokens_option(256)
@click.option("--load", "saved", type=click.Path(exists=True, path_type=Path), help="Go on with a saved conversation.")
def chat(choice: Choice, sampling: dict[str, Any], max_tokens: int, saved: Path | None) -> None:
    from draftproof.cli.conversation import Conversation, Settings, restored
    from draftproof.cli.talk import talk

    conversation = Conversation(Settings(choice, sampling, max_tokens)) if saved is None else restored(saved)
    talk(conversation)
