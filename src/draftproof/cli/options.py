"""Options that several commands share, and `Choice`, which collects the options that select an engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from draftproof.cli.suggest import did_you_mean

RULES: Final = ("block", "token", "coupled", "tree")
"""The names in `draftproof.rules.RULES`, repeated here because importing that module imports torch."""

DRAFTERS: Final = (
    *("auto", "ngram", "suffix", "prompt-lookup", "early-exit:N", "head", "suffix+head"),
    *("eagle3:FOLDER", "dflash:FOLDER", "mtp"),
)
"""The names in `draftproof.drafters.registry`, repeated here because importing that module imports torch."""


class Finite(click.FloatRange):
    """A click type for numbers in a range; refuses nan and inf, which `click.FloatRange` accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Seed(click.types.IntParamType):
    """A click type for whole numbers of 64 bits. Unlike `click.IntRange`, it does not print its range in --help."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not -(2**63) <= number < 2**63:
            self.fail(f"{value} is not a whole number of 64 bits.", param, ctx)
        return number


SAMPLING: Final[Mapping[str, "click.ParamType[Any]"]] = {
    "temperature": Finite(min=0),
    "top_k": click.IntRange(min=0),
    "top_p": Finite(min=0, max=1, min_open=True),
    "min_p": Finite(min=0, max=1),
    "seed": Seed(),
}
"""The fields of `SamplingParams` that the commands set, with the values it accepts (and 0 for top_k, which is off).

They are checked here because `SamplingParams` imports torch: a wrong value is refused at once."""

WEIGHTS: Final = ("auto", "float32", "int4", "int8")
"""The names in `draftproof.models.loading.WEIGHTS`, repeated here because importing that module imports torch."""

DEVICE_HELP: Final = "Device to run on, such as cuda or cpu. [default: cuda if available, else cpu]"

Command = Callable[..., Any]
Option = Callable[[Command], Command]


@dataclass(frozen=True, slots=True)
class Choice:
    """The options that select an engine: its target, drafter, rule, draft length, device and weights."""

    target: str = "smollm2"
    drafter: str | None = "auto"
    rule: str = "block"
    num_draft_tokens: int | str = "auto"
    device: str | None = None
    weights: str = "auto"

    def __str__(self) -> str:
        if self.drafter is None:
            return f"{self.target}, plain decoding"
        return f"{self.target}, drafter {self.drafter}, rule {self.rule}, draft length {self.num_draft_tokens}"


def engine_options(
    *, drafter: str = "auto", rule: str = "block", rules: tuple[str, ...] = RULES, num_draft_tokens: str = "auto"
) -> Option:
    """Add the options that select an engine to a command, which receives them as one argument, `choice`.

    The arguments are the command's defaults and the rules it offers.
    """
    options: list[Option] = [
        target_option(),
        click.option(
            "--draft-model", metavar="MODEL",
            help="Draft with a smaller model: a folder or a Hugging Face model id. If it has another tokenizer, "
            "tli:MODEL draws from the tokens that both have, and slem:MODEL encodes its text again; by default TLI if "
            "they share 90 % of the tokens, else SLEM for --temperature 0.",
        ),
        click.option(
            "--drafter", metavar="NAME", show_default=drafter,
            help="How draft tokens are proposed: ngram, suffix or prompt-lookup (copied from the text so far), "
            "early-exit:N (the target's first N layers), head or head:FOLDER (a trained drafting head), suffix+head "
            "(copied where the text repeats, else the head), eagle3:FOLDER or dflash:FOLDER (a published EAGLE-3 head "
            "or DFlash drafter), mtp (the multi-token prediction layer of the target's checkpoint), auto (the bundled "
            "head if it fits the target, else ngram), or none (plain decoding).",
        ),
        draft_length_option(num_draft_tokens),
        click.option(
            "--rule", type=click.Choice(rules), default=rule, show_default=True,
            help="How draft tokens are accepted or rejected. Every rule keeps the target's output distribution."
            + (" With coupled and a --seed, all drafters give the same text." if "coupled" in rules else ""),
        ),
        click.option("--device", metavar="NAME", help=DEVICE_HELP),
        click.option(
            "--weights", type=click.Choice(WEIGHTS), default="auto", show_default=True,
            help="Weights on a CPU: the model's own, or quantised when it is loaded; the target then is the quantised "
            "model. auto is int4 for smollm2, whose file holds four bits, if the CPU has AVX-512 VNNI; else float32.",
        ),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_choice(**values: Any) -> Any:
            model, name = values.pop("draft_model"), values.pop("drafter")
            if model is not None and name is not None:
                raise click.UsageError("--draft-model and --drafter both choose the drafter: give only one of them")
            if name is not None:
                check_drafter(name)
            chosen = model or drafter_or_none(name or drafter)
            rest = {field: values.pop(field) for field in ("target", "rule", "num_draft_tokens", "device", "weights")}
            return command(choice=Choice(drafter=chosen, **rest), **values)

        return _with(options, with_choice)

    return decorate


def sampling_options() -> Option:
    """Add sampling options to a command, which receives those that were given as one argument, `sampling`.

    `engines.sampling_for` takes the others from the model.
    """
    helps = {
        "temperature": "Sampling temperature; 0 is greedy decoding. [default: the model's own, else 0.7]",
        "top_k": "Sample only from the K most likely tokens; 0 for all. [default: the model's own, else all]",
        "top_p": "Sample only from the most likely tokens whose total probability reaches P. [default: the model's "
        "own, else 1]",
        "min_p": "Sample only from tokens at least this fraction as likely as the most likely token.",
        "seed": "Random seed: the same seed gives the same text.",
    }
    options: list[Option] = [
        click.option(f"--{name.replace('_', '-')}", type=SAMPLING[name], metavar="N", help=words)
        for name, words in helps.items()
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_sampling(**values: Any) -> Any:
            given = {name: value for name in SAMPLING if (value := values.pop(name)) is not None}
            return command(sampling=switch_off_zero(given), **values)

        return _with(options, with_sampling)

    return decorate


def switch_off_zero(given: dict[str, Any]) -> dict[str, Any]:
    """Replace a top_k of 0, which is off in transformers and vLLM, by None, which is off in `SamplingParams`."""
    return {name: None if name == "top_k" and value == 0 else value for name, value in given.items()}


def target_option() -> Option:
    """Return the option --target, with the bundled model as its default."""
    return click.option(
        "--target", metavar="MODEL", default="smollm2", show_default=True,
        help="Target model: smollm2 (bundled, 135M parameters), a folder or a Hugging Face model id.",
    )  # fmt: skip


def draft_length_option(default: str = "auto") -> Option:
    """Return the option --num-draft-tokens, parsed to "auto" or a number."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str) -> int | str:
        try:
            return parse_draft_length(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return click.option(
        "--num-draft-tokens", metavar="auto|N", callback=parsed, default=default, show_default=True,
        help="Draft tokens per round; auto picks the number that is fastest.",
    )  # fmt: skip


def max_tokens_option(default: int) -> Option:
    """Return the option --max-tokens."""
    return click.option(
        "--max-tokens", "-n", type=click.IntRange(0), default=default, show_default=True,
        help="Maximum number of tokens to generate.",
    )  # fmt: skip


def parse_draft_length(word: str) -> int | str:
    """Return a draft length as `load` takes it: "auto" or a number."""
    if word == "auto" or word.isdecimal():
        return word if word == "auto" else int(word)
    raise ValueError(f"{word!r} is neither 'auto' nor a whole number")


def check_drafter(name: str) -> None:
    """Refuse a name that no drafter has; otherwise `load` would look for a model of that name on the hub.

    A folder passes: its files say what it holds.
    """
    known = ["none", *(drafter.partition(":")[0] for drafter in DRAFTERS)]
    if name.partition(":")[0] not in known and not Path(name).is_dir():
        raise click.UsageError(
            f"--drafter takes {', '.join(DRAFTERS)} or none, not {name!r}{did_you_mean(name, known) or '.'} To draft "
            "with a model, use --draft-model"
        )


def drafter_or_none(word: str) -> str | None:
    """Return the drafter as `load` takes it: None for the word "none", which means plain decoding."""
    return None if word == "none" else word


def _with(options: list[Option], command: Command) -> Command:
    """Apply click's decorators so that --help lists the options in the given order."""
    for option in reversed(options):
        command = option(command)
    return command
