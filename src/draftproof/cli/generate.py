"""`draftproof generate`: continue one prompt, streaming the text, or all prompts of a file."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import spinner
from draftproof.cli.engines import open_engine, sampling_for
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import SAMPLING, Choice, engine_options, max_tokens_option, sampling_options
from draftproof.cli.prompt_file import PromptLine, answer_all, read_prompt_lines, read_prompts
from draftproof.cli.text import check_text, read_stdin

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.engine.request import Chunk, Output, Stats

__all__ = ["Answer", "generate", "read_prompts", "stats_dict", "stats_line", "stream_answer"]

HELP = """Continue PROMPT, or text from stdin, and print the answer as it is generated.

\b
Examples:
  draftproof generate "Why is the sky blue?"
  draftproof generate "Write a haiku" --temperature 0.9 --seed 7 --stats
  cat notes.txt | draftproof generate --max-tokens 100
  draftproof generate "…" --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B
  draftproof generate "…" --rule coupled --seed 7       same text as --drafter none --seed 7, but faster
  draftproof generate --prompts prompts.jsonl > answers.jsonl

Each line of a --prompts file is a JSON string, or an object with "prompt" (a text or a list of chat messages). The
object may set "max_tokens", "stop", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
"presence_penalty", "frequency_penalty" and "logit_bias" for its prompt; they come before the options of the command
line. Other fields, such as "id", are copied to its result. The results are JSON objects, one per line, in the same
order.

Ctrl-C stops generating and keeps the text printed so far.
"""


@click.command(help=HELP, short_help="Continue a prompt, or a file of prompts.")
@click.argument("prompt", required=False)
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Continue all prompts of a file, one JSON value per line.",
)  # fmt: skip
@engine_options()
@sampling_options()
@max_tokens_option(256)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text. Can be given several times.")
@click.option(
    "--num-beams", type=click.IntRange(1), default=1,
    help="Use beam search with this many beams. It does not sample and does not draft, so options for these are "
    "refused.",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Print speed and acceptance rate to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object instead of streaming text.")
def generate(
    prompt: str | None, prompts: Path | None, choice: Choice, num_beams: int, stats: bool, as_json: bool, **rest: Any
) -> int:
    if prompts is not None and prompt is not None:
        raise click.UsageError("give PROMPT or --prompts, not both")
    options = Options(rest["sampling"], rest["max_tokens"], rest["stop"], False if rest["raw"] else None, num_beams)
    if num_beams > 1:
        _refuse_with_beams(click.get_current_context())
        choice = replace(choice, drafter=None)
    if prompts is not None:
        lines = read_prompt_lines(prompts)
        if num_beams > 1:
            _refuse_lines_with_beams(lines)
        return answer_all(open_engine(choice), lines, options, stats=stats)
    text = _prompt_or_stdin(prompt)
    return answer_one(open_engine(choice), text, options, stats=stats, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request, as given: `sampling` holds only the fields that were set."""

    sampling: dict[str, Any]
    max_tokens: int
    stop: tuple[str, ...]
    chat: bool | None
    num_beams: int

    def for_prompt(self, engine: "Engine") -> dict[str, Any]:
        """Return the keyword arguments of `Engine.stream`, or of `Engine.generate` if there are beams."""
        if self.num_beams > 1:
            return {"max_tokens": self.max_tokens, "chat": self.chat, "num_beams": self.num_beams}
        sampling = sampling_for(engine, self.sampling)
        return {"sampling": sampling, "max_tokens": self.max_tokens, "stop": list(self.stop), "chat": self.chat}

    def for_lines(self, engine: "Engine", lines: Sequence[PromptLine]) -> dict[str, Any]:
        """Return the keyword arguments of `Engine.generate` for lines with the same `stop`.

        What a line sets comes before what the command line sets.
        """
        max_tokens = [self.max_tokens if line.max_tokens is None else line.max_tokens for line in lines]
        if self.num_beams > 1:
            return {"max_tokens": max_tokens, "chat": self.chat, "num_beams": self.num_beams}
        sampling = [sampling_for(engine, {**self.sampling, **line.sampling}) for line in lines]
        stop = self.stop if lines[0].stop is None else lines[0].stop
        return {"sampling": sampling, "max_tokens": max_tokens, "stop": list(stop), "chat": self.chat}


def _refuse_with_beams(ctx: click.Context) -> None:
    """Refuse options of sampling and drafting next to --num-beams: beam search would ignore them."""
    ignored = ("drafter", "draft_model", "num_draft_tokens", "rule", *SAMPLING, "stop")
    given = [
        f"--{name.replace('_', '-')}"
        for name in ignored
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--num-beams is beam search, which neither samples nor drafts and has no stop texts: leave out "
            f"{', '.join(given)}"
        )


def _refuse_lines_with_beams(lines: Sequence[PromptLine]) -> None:
    for line in lines:
        ignored = [*line.sampling, *(["stop"] if line.stop is not None else [])]
        if ignored:
            raise ValueError(f"{line.source}: beam search (--num-beams) would ignore {', '.join(ignored)}; remove it")


def _prompt_or_stdin(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return check_text(prompt, "PROMPT")
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError(
            'no prompt: give one as an argument, as in draftproof generate "Why is the sky blue?", or on stdin'
        )
    text = read_stdin().rstrip("\n")
    if not text:
        raise click.UsageError("stdin is empty: give a prompt as an argument or on stdin")
    return text


def _no_stats() -> "Stats":
    from draftproof.engine.request import Stats

    return Stats()


@dataclass(slots=True)
class Answer:
    """A generated text with its tokens, counts and times; after an interrupt it holds what was generated until then."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: "Stats" = field(default_factory=_no_stats)
    seconds: float = 0.0
    first_token: float | None = None
    lossy: dict[str, Any] = field(default_factory=dict)
    """Fields that say how far off a lossy rule is; empty if the rule is exact."""

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            **self.lossy,
            "stats": {
                **stats_dict(self.stats),
                "wall_seconds": self.seconds,
                "first_token_seconds": self.first_token,
                "tokens_per_second": self.tokens_per_second,
            },
        }


def stats_dict(stats: "Stats") -> dict[str, Any]:
    """Return a request's counts and rates as JSON can hold them."""
    return {
        "rounds": stats.rounds,
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_by_position": stats.rates_by_position,
        "seconds": stats.seconds,
    }


def stats_line(answer: Answer) -> str:
    """Describe speed, time to the first token and acceptance in one line."""
    parts = [f"{len(answer.tokens)} tokens in {answer.seconds:.1f} s ({answer.tokens_per_second:.1f} tokens/s)"]
    if answer.first_token is not None:
        parts.append(f"first token after {answer.first_token:.2f} s")
    stats = answer.stats
    if stats.drafted:
        accepted = f"accepted {stats.accepted} of {stats.drafted} draft tokens ({stats.acceptance_rate:.0%})"
        parts += [accepted, f"mean acceptance length {stats.mean_acceptance_length:.2f}"]
    if stats.rounds:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    if answer.lossy:
        distance = answer.lossy["total_variation"]
        parts.append(
            f"lossy rule: total variation {'unknown' if distance is None else f'up to {distance:.3g} at a position'}"
        )
    return " · ".join(parts)


def lossy_fields(output: "Output | Chunk") -> dict[str, Any]:
    """Return {} for an exact output, else fields that say so, with the largest total variation at a draft position."""
    if output.exact:
        return {}
    return {"exact": False, "total_variation": output.deviation}


def stream_answer(engine: "Engine", prompt: Any, arguments: dict[str, Any], into: Answer) -> Iterator[str]:
    """Yield the text of each round, which may be empty, and update `into`, so that an interrupt loses nothing.

    `arguments` are the keyword arguments of `Engine.stream`.
    """
    start = time.perf_counter()
    for chunk in engine.stream(prompt, **arguments):
        into.seconds = time.perf_counter() - start
        into.first_token = into.seconds if into.first_token is None else into.first_token
        into.text += chunk.text
        into.tokens += chunk.tokens
        into.stats = chunk.stats
        into.finish_reason = chunk.finish_reason or into.finish_reason
        into.lossy = lossy_fields(chunk)
        yield chunk.text


def answer_one(engine: "Engine", prompt: str, options: Options, *, stats: bool, as_json: bool) -> int:
    """Print the answer to one prompt on stdout and return the exit status."""
    answer, arguments = Answer(), options.for_prompt(engine)
    status = 0
    try:
        if options.num_beams > 1:
            _beam_search(engine, prompt, arguments, answer)
            if not as_json:
                sys.stdout.write(answer.text)
        else:
            with _spinner_if(as_json):
                for piece in stream_answer(engine, prompt, arguments, answer):
                    if not as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.write(json.dumps(answer.as_dict(), ensure_ascii=False) + "\n" if as_json else "\n")
    sys.stdout.flush()
    if stats:
        print(stats_line(answer), file=sys.stderr)
    return status


@contextmanager
def _spinner_if(as_json: bool) -> Iterator[None]:
    """Show a spinner if no text is streamed."""
    if not as_json:
        yield
        return
    with spinner("Generating"):
        yield


def _beam_search(engine: "Engine", prompt: str, arguments: dict[str, Any], into: Answer) -> None:
    start = time.perf_counter()
    with spinner(f"Searching with {arguments['num_beams']} beams"):
        output = engine.generate(prompt, **arguments)
    into.text, into.tokens, into.finish_reason = output.text, output.tokens, output.finish_reason
    into.stats, into.seconds = output.stats, time.perf_counter() - start
