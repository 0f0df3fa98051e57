"""`draftproof chat`: a conversation in the terminal whose drafter, rule and sampling can be changed on the way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import screen
from draftproof.cli.conversation import Conversation, Settings, load_conversation
from draftproof.cli.generate import Answer, stats_line
from draftproof.cli.main import error_line
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options
from draftproof.cli.slash import COMMANDS, LeaveChat, run_command
from draftproof.cli.text import check_text, decode

if TYPE_CHECKING:
    from rich.console import Console

    from draftproof.explain.recorder import Recorder

HELP = """Talk to a model, and change drafter, rule and sampling during the conversation.

Lines that begin with a slash are commands: /help lists them, and Tab completes them. The up key recalls earlier
input. Enter sends a message, Alt-Enter begins a new line in it. Ctrl-C stops an answer and keeps its text so far.
Ctrl-D leaves the chat.

\b
Examples:
  draftproof chat
  draftproof chat --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B
  draftproof chat --load yesterday.json
\b
Commands to try in the chat:
  /compare on          answer every prompt with and without drafters, side by side
  /rounds on           after each answer, show which draft tokens were accepted
  /drafter suffix      change the drafter
"""


@click.command(help=HELP, short_help="Talk to a model in the terminal.")
@engine_options()
@sampling_options()
@max_tokens_option(256)
@click.option(
    "--load", "saved", type=click.Path(exists=True, path_type=Path),
    help="Continue a conversation that /save wrote, with its settings.",
)  # fmt: skip
def chat(choice: Choice, sampling: dict[str, Any], max_tokens: int, saved: Path | None) -> None:
    conversation = Conversation(Settings(choice, sampling, max_tokens)) if saved is None else load_conversation(saved)
    talk(conversation)


def talk(conversation: Conversation) -> None:
    """Answer the user's lines until Ctrl-D, /quit or the end of stdin."""
    console = screen()
    conversation.engines.get(conversation.settings.choice)
    from draftproof.core.types import (
        InexactError,
    )  # not before: importing torch takes seconds, and `get` shows a spinner

    console.print(f"{conversation.settings.choice} · /help lists the commands, Ctrl-D leaves", style="bright_black")
    for line in _lines(conversation):
        try:
            _answer(console, conversation, line)
        except LeaveChat:
            return
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="bright_black")
        except (ValueError, RuntimeError, OSError, InexactError) as error:
            console.print(error_line(error), style="red", markup=False)


def _answer(console: "Console", conversation: Conversation, line: str) -> None:
    check_text(line, "the message")
    if line.startswith("/"):
        console.print(run_command(conversation, line), style="cyan", markup=False, soft_wrap=True)
    elif conversation.settings.compare:
        _answer_side_by_side(console, conversation, line)
    else:
        _stream(console, conversation, line)


def _answer_side_by_side(console: "Console", conversation: Conversation, line: str) -> None:
    """Answer with several drafters. The answer of the chosen one becomes part of the conversation."""
    from draftproof.cli.compare import choices_to_compare, run_side_by_side, same_seed_if_coupled, why_texts_differ
    from draftproof.drafters.registry import meant

    choice = conversation.settings.choice
    hf = conversation.engines.get(choice).loaded
    choices = choices_to_compare(choice, hf)
    prompt = conversation.prompt(line)
    sampling = same_seed_if_coupled(conversation.sampling, choice)
    arguments = {**conversation.arguments, "sampling": sampling}
    answers = run_side_by_side(console, conversation.engines, choices, prompt, arguments)
    console.print(why_texts_differ(answers.values(), sampling, choice), style="bright_black", markup=False)
    chosen = "plain" if choice.drafter is None else meant(choice.drafter, hf)
    conversation.note(line, answers[chosen].text)


def _stream(console: "Console", conversation: Conversation, line: str) -> None:
    """Print the answer as it is generated, then its speed and, if wanted, its rounds."""
    from draftproof.explain.recorder import Recorder

    settings, answer = conversation.settings, Answer()
    recorder = Recorder(settings.choice.rule) if settings.rounds and settings.choice.drafter is not None else None
    try:
        shown = _wrapped(console)
        with closing(conversation.say(line, answer, recorder)) as pieces:
            for piece in pieces:
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
    finally:
        console.print()
        if answer.tokens:
            console.print(stats_line(answer), style="bright_black", soft_wrap=True)
    if recorder is not None:
        _show_rounds(console, conversation, recorder)


def _wrapped(console: "Console") -> Callable[[str], str]:
    """Return a function that wraps pieces of text between words on a terminal, and leaves them unchanged elsewhere."""
    if not console.is_terminal:
        return str
    from draftproof.cli.wrap import WordWrapper

    return WordWrapper(lambda: console.width).feed


def _show_rounds(console: "Console", conversation: Conversation, recorder: "Recorder") -> None:
    from draftproof.explain.explanation import label
    from draftproof.explain.terminal import legend, ribbon

    tokenizer = conversation.engines.get(conversation.settings.choice).tokenizer
    if tokenizer is None:
        return
    console.print(legend())
    for number, round_ in enumerate(recorder.rounds, 1):
        console.print(f"{number:>4}  ", ribbon(round_, partial(label, tokenizer)), sep="", soft_wrap=True)


def _lines(conversation: Conversation) -> Iterator[str]:
    """Yield the lines the user enters that are not blank: from a prompt, or from stdin if it is not a terminal."""
    read = _line_editor(conversation) if sys.stdin.isatty() else partial(_read_stdin, count(1))
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            continue  # Ctrl-C clears the line, as in a shell
        except EOFError:
            return
        if line.strip():
            yield line


def _read_stdin(numbers: Iterator[int]) -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decode(line, f"stdin, line {next(numbers)}").rstrip("\n")


def _line_editor(conversation: Conversation) -> Callable[[], str]:
    """Return a function that reads a message with editing, history and completion."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from draftproof.models.bundled import folder

    history = folder().parent / "chat-history"
    history.parent.mkdir(parents=True, exist_ok=True)
    descriptions = {name: command.description for name, command in COMMANDS.items()}
    completer: Any = WordCompleter(list(COMMANDS), meta_dict=descriptions, sentence=True)
    keys = KeyBindings()

    @keys.add("escape", "enter")  # a terminal sends Alt-Enter as these two
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)), completer=completer, complete_while_typing=True, key_bindings=keys
    )
    return lambda: session.prompt("you › ", bottom_toolbar=lambda: _toolbar(conversation))


def _toolbar(conversation: Conversation) -> str:
    settings, sampling = conversation.settings, conversation.sampling
    modes = [name for name, on in (("compare", settings.compare), ("rounds", settings.rounds)) if on]
    return " · ".join([str(settings.choice), f"temperature {sampling.temperature:g}", *modes])
