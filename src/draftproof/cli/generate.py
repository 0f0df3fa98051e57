"""`draftproof generate`: one prompt, streamed as it comes, or a file of prompts."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftproof.cli.console import waiting
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options
from draftproof.engine.engine import Engine
from draftproof.engine.request import Stats

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

        items = read_prompts(prompts)
        return answer_all(_opened(choice), items, options, stats=stats)
    text = _text(prompt)
    engine = _opened(choice)

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
    from draftproof.cli.engines import open_engine

    return open_engine(choice)


@dataclass(slots=True)
class Answer:
    """What has come so far, and when. Whole or cut short, it can be shown."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    first_token: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "stats": {
                **stats_dict(self.stats),
                "wall_seconds": self.seconds,
                "first_token_seconds": self.first_token,
                "tokens_per_second": self.tokens_per_second,
            },
        }


def stats_dict(stats: Stats) -> dict[str, Any]:
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


def streamed(engine: Engine, prompt: Any, options: dict[str, Any], into: Answer) -> Iterator[str]:
    """A piece of text a round, also an empty one; `into` is filled meanwhile, so an interrupt finds all there is."""
    start = time.perf_counter()
    for chunk in engine.stream(prompt, **options):
        into.seconds = time.perf_counter() - start
        into.first_token = into.seconds if into.first_token is None else into.first_token
        into.text += chunk.text
        into.tokens += chunk.tokens
        into.stats = chunk.stats
        into.finish_reason = chunk.finish_reason or into.finish_reason
        yield chunk.text


def answer(engine: Engine, prompt: str, options: dict[str, Any], *, stats: bool, as_json: bool) -> int:
    """Say it on stdout; the status to leave with."""
    made = Answer()
    status = 0
    try:
        if options["num_beams"] > 1:
            _searched(engine, prompt, options, made)
            if not as_json:
                sys.stdout.write(made.text)
        else:
            del options["num_beams"]
            with _quietly_if(as_json):
                for piece in streamed(engine, prompt, options, made):
                    if not as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.stdout.write(json.dumps(made.as_dict(), ensure_ascii=False) + "\n" if as_json else "\n")
    sys.stdout.flush()
    if stats:
        print(in_words(made), file=sys.stderr)
    return status


@contextmanager
def _quietly_if(as_json: bool) -> Iterator[None]:
    """Where no text shows that something happens, say so."""
    if not as_json:
        yield
        return
    with waiting("Generating"):
        yield


def _searched(engine: Engine, prompt: str, options: dict[str, Any], into: Answer) -> None:
    start = time.perf_counter()
    with waiting(f"Searching with {options['num_beams']} beams"):
        output = engine.generate(prompt, **options)
    assert not isinstance(output, list)
    into.text, into.tokens, into.finish_reason = output.text, output.tokens, output.finish_reason
    into.stats, into.seconds = output.stats, time.perf_counter() - start


def in_words(made: Answer) -> str:
    """Speed, first token, and what came of the drafts, in one line."""
    parts = [f"{len(made.tokens)} tokens in {made.seconds:.1f} s ({made.tokens_per_second:.1f} a second)"]
    if made.first_token is not None:
        parts.append(f"first after {made.first_token:.2f} s")
    stats = made.stats
    if stats.drafted:
        kept = f"kept {stats.accepted} of {stats.drafted} drafted ({stats.acceptance_rate:.0%})"
        parts += [kept, f"mean acceptance length {stats.mean_acceptance_length:.2f}"]
    if stats.rounds:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens a pass")
    return " · ".join(parts)


Item = dict[str, Any]


def read_prompts(path: Path) -> list[Item]:
    """The lines of a JSON-lines file as objects with a "prompt"."""
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            read = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f'{path}, line {number}: not JSON ({error.msg}). A line is "text" or {{"prompt": …}}'
            ) from None
        item = {"prompt": read} if isinstance(read, str) else read
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), (str, list)):
            raise ValueError(f'{path}, line {number}: a line is a JSON string or an object with "prompt"')
        items.append(item)
    if not items:
        raise ValueError(f"{path} has no prompts in it")
    return items


def answer_all(engine: Engine, items: Sequence[Item], options: dict[str, Any], *, stats: bool) -> int:
    """Results in the order of the prompts. What is done when Ctrl-C comes has been written already."""
    start, tokens, failed = time.perf_counter(), 0, 0
    try:
        with _progress() as progress:
            task = progress.add_task("Answering", total=len(items))
            for group in _groups(items, engine.limits.max_batch):
                for result in _answered(engine, group, options):
                    tokens += len(result["tokens"])
                    failed += result["finish_reason"] == "error"
                    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
                sys.stdout.flush()
                progress.advance(task, len(group))
    except KeyboardInterrupt:
        return INTERRUPTED
    if stats:
        seconds = time.perf_counter() - start
        speed = f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} a second)"
        print(f"{len(items)} prompts, {failed} failed · {speed}", file=sys.stderr)
    return 1 if failed else 0


def _answered(engine: Engine, group: Sequence[Item], options: dict[str, Any]) -> Iterator[Item]:
    outputs = engine.generate([item["prompt"] for item in group], **options)
    assert isinstance(outputs, list)
    for item, output in zip(group, outputs, strict=True):
        result = {"text": output.text, "tokens": output.tokens, "finish_reason": output.finish_reason}
        failure = {"error": output.error} if output.error else {}
        yield {**item, **result, **failure, "stats": stats_dict(output.stats)}


def _groups(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
