"""The door of the command line: finds the command, runs it, and turns errors into one clear line."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final, NoReturn

import click

COMMANDS: Final[Mapping[str, str]] = {
    name: f"draftproof.cli.{name}"
    for name in ("generate", "chat", "explain", "bench", "audit", "train", "models", "demo")
}
"""The commands, and the file each lives in: it has an attribute of the command's name."""

INTERRUPTED: Final = 130
"""What a shell expects of a program that Ctrl-C has ended."""

HELP: Final = """Lossless speculative decoding: the target's own distribution, in fewer of its passes.

A cheap drafter guesses a few tokens; the target judges all of them in one pass, and keeps exactly as many as its own
distribution allows. What is said does not change, only how fast.

\b
First steps:
  draftproof demo                                     plain and speculative, side by side
  draftproof generate "Why is the sky blue?"          the bundled model answers, streaming
  draftproof explain "Why is the sky blue?"           every round, every coin
  draftproof chat                                     a conversation, with /help

\b
With models of your own (a folder or a hub id):
  draftproof generate --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B "…" --stats

`draftproof COMMAND --help` has the options and more examples.
"""


class Commands(click.Group):
    """Imports a command when it is asked for, and gives each the same --debug."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        if not any(param.name == "debug" for param in command.params):
            command.params.append(_debug())
        return command


def _debug() -> click.Option:
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="On an error, show the traceback.")


@click.group(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="draftproof")
def app() -> None:
    pass


app.params.append(_debug())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its status: 0 fine, 1 failed, 2 wrong request, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app.main(given, prog_name="draftproof", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as wanted:
        click.echo(wanted.format_message())
        status = 0
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}{_advice(error)}", err=True)
        status = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    except BrokenPipeError:  # `… | head` has seen enough; without this the interpreter would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        if "--debug" in given:
            raise
        click.echo(f"Error: {in_one_line(error)}", err=True)
        status = status_of(error)
    sys.exit(status or 0)


def _advice(error: click.ClickException) -> str:
    """Where a wrong call is put right."""
    where = error.ctx if isinstance(error, click.UsageError) else None
    return f" (`{where.command_path} --help` has examples)" if where is not None else ""


def in_one_line(error: Exception) -> str:
    """What a user needs of an error. One that we did not foresee also says its kind and how to see more."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, (ValueError, RuntimeError, OSError, ImportError)) or type(error).__name__ == "InexactError":
        return said or type(error).__name__
    return f"{type(error).__name__}: {said} (run again with --debug to see where)"


def status_of(error: Exception) -> int:
    """2 for a request that cannot be served, 1 for one that failed. `InexactError` by name: importing it imports torch."""
    return 2 if isinstance(error, ValueError) or type(error).__name__ == "InexactError" else 1
