"""The options that commands share, gathered into what the engine takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import click

RULES: Final = ("block", "token", "coupled", "tree")
"""The names of `verify.RULES`, which cannot be imported for a --help: it would import torch."""

DRAFTERS: Final = ("auto", "ngram", "suffix", "prompt-lookup", "early-exit:N", "head", "suffix+head")
"""The names of `drafters.table`, for the same reason."""

Command = Callable[..., Any]
Option = Callable[[Command], Command]

SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which engine: its models, its drafter and its rule."""

    target: str = "smollm2"
    drafter: str | None = "auto"
    rule: str = "block"
    num_draft_tokens: int | str = "auto"
    device: str | None = None

    def __str__(self) -> str:
        if self.drafter is None:
            return f"{self.target}, plain decoding"
        return f"{self.target}, drafter {self.drafter}, rule {self.rule}, draft length {self.num_draft_tokens}"


def draft_length(word: str) -> int | str:
    if word == "auto" or word.isdecimal():
        return word if word == "auto" else int(word)
    raise ValueError(f"{word!r} is neither 'auto' nor a whole number")


def draft_length_option(default: str = "auto") -> Option:
    def parsed(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
        try:
            return draft_length(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return click.option(
        "--num-draft-tokens", metavar="auto|N", callback=parsed, default=default, show_default=True,
        help="Tokens guessed a round; auto takes what pays.",
    )  # fmt: skip


def check_drafter(name: str) -> None:
    """Refuse a name that is none of ours here: as the name of a model it would be looked for on a hub."""
    if name != "none" and name.partition(":")[0] not in {known.partition(":")[0] for known in DRAFTERS}:
        raise click.UsageError(f"--drafter takes {', '.join(DRAFTERS)} or none, not {name!r}; a model: --draft-model")


def drafter_of(word: str) -> str | None:
    """What `load` takes: None where plain decoding is asked for."""
    return None if word == "none" else word


def engine_options(
    *, drafter: str = "auto", rule: str = "block", rules: tuple[str, ...] = RULES, num_draft_tokens: str = "auto"
) -> Option:
    """Gives a command `choice`. A command may have defaults of its own."""
    options: list[Option] = [
        click.option(
            "--target", metavar="MODEL", default="smollm2", show_default=True,
            help="smollm2 (bundled, 135M), a folder or a hub id.",
        ),
        click.option(
            "--draft-model", metavar="MODEL", help="A smaller model of the same family guesses: a folder or a hub id."
        ),
        click.option(
            "--drafter", metavar="NAME", show_default=drafter,
            help="Who guesses: ngram, suffix, prompt-lookup, early-exit:N (the target's first N layers), head or "
            "head:FOLDER (trained), suffix+head, auto (the shipped head if it fits the target, else ngram), or none "
            "for plain decoding.",
        ),
        draft_length_option(num_draft_tokens),
        click.option(
            "--rule", type=click.Choice(rules), default=rule, show_default=True,
            help="How guesses are judged; all are exact."
            + (" Under coupled the text depends on --seed and on no drafter." if "coupled" in rules else ""),
        ),
        click.option("--device", metavar="NAME", help="cuda, cpu …; default: CUDA where there is one."),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_choice(**given: Any) -> Any:
            model, name = given.pop("draft_model"), given.pop("drafter")
            if model is not None and name is not None:
                raise click.UsageError("--draft-model and --drafter both say who guesses: give one of them")
            if name is not None:
                check_drafter(name)
            who = model or drafter_of(name or drafter)
            rest = {field: given.pop(field) for field in ("target", "rule", "num_draft_tokens", "device")}
            return command(choice=Choice(drafter=who, **rest), **given)

        return _with(options, with_choice)

    return decorate


def sampling_options(*, temperature: float = 0.7) -> Option:
    """Gives a command `sampling`, the fields of a `SamplingParams`."""
    options: list[Option] = [
        click.option("--temperature", type=float, default=temperature, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, help="Only the K most likely tokens."),
        click.option("--top-p", type=float, default=1.0, help="Only the most likely tokens that reach this mass."),
        click.option("--min-p", type=float, default=0.0, help="Only tokens this fraction as likely as the top one."),
        click.option("--seed", type=int, help="The same seed gives the same text."),
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_sampling(**given: Any) -> Any:
            return command(sampling={field: given.pop(field) for field in SAMPLING}, **given)

        return _with(options, with_sampling)

    return decorate


def max_tokens_option(default: int) -> Option:
    return click.option(
        "--max-tokens", "-n", type=click.IntRange(0), default=default, show_default=True, help="Most tokens to say."
    )


def _with(options: list[Option], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
