"""The entry point of the command line: finds the command, runs it, and reports errors in one line."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final, NoReturn

import click

from draftproof.cli.suggest import did_you_mean

COMMANDS: Final[Mapping[str, str]] = {
    name: f"draftproof.cli.{name}"
    for name in ("generate", "chat", "serve", "explain", "bench", "audit", "train", "models", "demo", "env")
}
"""The module of each command; the command is the module's attribute of the same name."""

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, which shells expect."""

HELP: Final = """Speculative decoding that does not change the model's output distribution.

A cheap drafter proposes a few tokens. The target model checks all of them in one pass and accepts as many as its own
distribution allows. The text is distributed as in plain decoding; it only arrives sooner.

\b
First steps:
  draftproof demo                                     plain and speculative decoding, side by side
  draftproof generate "Why is the sky blue?"          stream an answer of the bundled model
  draftproof explain "Why is the sky blue?"           show which draft tokens were accepted, and why
  draftproof chat                                     talk to the model; type /help for commands
  draftproof serve                                    serve it with OpenAI's interface

\b
With your own models (a folder or a Hugging Face model id):
  draftproof generate --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B "…" --stats

Run `draftproof COMMAND --help` for a command's options and examples.
"""


class Commands(click.Group):
    """A click group that imports a command's module when it is used and adds --debug to every command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        if not any(param.name == "debug" for param in command.params):
            command.params.append(_debug())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"No such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


def _debug() -> click.Option:
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the full traceback of an error.")


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
    """Run the command line and exit with its status: 0 success, 1 failure, 2 invalid request, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app.main(arguments, prog_name="draftproof", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as no_arguments:
        click.echo(no_arguments.format_message())
        status = 0
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}{_help_hint(error)}", err=True)
        status = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        status = INTERRUPTED
    except BrokenPipeError:  # a reader such as `head` has closed the pipe; flushing stdout at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        if "--debug" in arguments:
            raise
        click.echo(f"Error: {error_line(error)}", err=True)
        status = exit_status(error)
    sys.exit(status or 0)


def _help_hint(error: click.ClickException) -> str:
    """Return a hint that names the help of the command that was called wrongly."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f" (`{context.command_path} --help` has examples)" if context is not None else ""


def error_line(error: Exception) -> str:
    """Return an error's first line; for a type no command is expected to raise, add the type and mention --debug."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    expected = (ValueError, RuntimeError, OSError, ImportError)
    if isinstance(error, expected) or _is_inexact(error):
        return message or type(error).__name__
    return f"{type(error).__name__}: {message} (run again with --debug for the traceback)"


def exit_status(error: Exception) -> int:
    """Return 2 for a request that cannot be served, 1 for one that failed, or the status that the error has itself."""
    own: int | None = getattr(error, "exit_status", None)
    return own or (2 if isinstance(error, ValueError) or _is_inexact(error) else 1)


def _is_inexact(error: Exception) -> bool:
    """Return whether this is an `InexactError`, recognised by name because importing the class imports torch."""
    return type(error).__name__ == "InexactError"
