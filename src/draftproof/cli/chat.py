"""`draftproof chat`: a conversation in the terminal, with the engine's settings at hand."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from draftproof.cli import compare as contest
from draftproof.cli.console import screen
from draftproof.cli.conversation import Conversation, Settings, restored
from draftproof.cli.generate import Answer, in_words
from draftproof.cli.main import in_one_line
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options
from draftproof.cli.slash import COMMANDS, LeaveChat, obey
from draftproof.core.types import InexactError
from draftproof.drafters.registry import meant
from draftproof.explain.explanation import label
from draftproof.explain.recorder import Recorder
from draftproof.explain.terminal import legend, ribbon

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

    conversation = Conversation(Settings(choice, sampling, max_tokens)) if saved is None else restored(saved)
    talk(conversation)


def talk(conversation: Conversation) -> None:
    """Until Ctrl-D, /quit or the end of the input."""
    console = screen()
    conversation.engines.of(conversation.settings.choice)
    console.print(
        f"{conversation.settings.choice} · /help lists what you can change, Ctrl-D leaves", style="bright_black"
    )
    for line in _lines(conversation):
        try:
            _answer(console, conversation, line)
        except LeaveChat:
            return
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="bright_black")
        except (ValueError, RuntimeError, OSError, InexactError) as error:
            console.print(in_one_line(error), style="red", markup=False)


def _answer(console: Console, conversation: Conversation, line: str) -> None:
    if line.startswith("/"):
        console.print(obey(conversation, line), style="cyan", markup=False, soft_wrap=True)
    elif conversation.settings.compare:
        _compared(console, conversation, line)
    else:
        _spoken(console, conversation, line)


def _compared(console: Console, conversation: Conversation, line: str) -> None:
    choice = conversation.settings.choice
    hf = conversation.engines.of(choice).hf
    ways = contest.contestants(choice, hf)
    prompt = conversation.prompt(line)
    answers = contest.run(console, conversation.engines, ways, prompt, conversation.options)
    chosen = "plain" if choice.drafter is None else meant(choice.drafter, hf)
    conversation.note(line, answers[chosen].text)


def _spoken(console: Console, conversation: Conversation, line: str) -> None:
    settings, made = conversation.settings, Answer()
    recorder = Recorder(settings.choice.rule) if settings.rounds and settings.choice.drafter is not None else None
    try:
        with closing(conversation.say(line, made, recorder)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    finally:
        console.print()
        if made.tokens:
            console.print(in_words(made), style="bright_black", soft_wrap=True)
    if recorder is not None:
        _show_rounds(console, conversation, recorder)


def _show_rounds(console: Console, conversation: Conversation, recorder: Recorder) -> None:
    tokenizer = conversation.engines.of(conversation.settings.choice).tokenizer
    if tokenizer is None:
        return
    console.print(legend())
    for number, round_ in enumerate(recorder.rounds, 1):
        console.print(f"{number:>4}  ", ribbon(round_, partial(label, tokenizer)), sep="", soft_wrap=True)


def _lines(conversation: Conversation) -> Iterator[str]:
    """What the user enters; lines of stdin where that is no terminal."""
    read = _prompting(conversation) if sys.stdin.isatty() else _reading
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            continue  # Ctrl-C clears the line, as in a shell
        except EOFError:
            return
        if line.strip():
            yield line


def _reading() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _prompting(conversation: Conversation) -> Callable[[], str]:
    """Editing, history and completion."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    from draftproof.models.bundled import folder

    kept = folder().parent / "chat-history"
    kept.parent.mkdir(parents=True, exist_ok=True)
    words: Any = WordCompleter(list(COMMANDS), meta_dict={k: s.words for k, s in COMMANDS.items()}, sentence=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(kept)), completer=words, complete_while_typing=True
    )
    return lambda: session.prompt("you › ", bottom_toolbar=lambda: _toolbar(conversation))


def _toolbar(conversation: Conversation) -> str:
    settings = conversation.settings
    shown = [name for name, on in (("compare", settings.compare), ("rounds", settings.rounds)) if on]
    return " · ".join([str(settings.choice), f"temperature {settings.sampling['temperature']:g}", *shown])
