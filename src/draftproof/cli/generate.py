"""`draftproof generate`: continue one prompt, streaming the text, or all prompts of a file."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import spinner
from draftproof.cli.engines import open_engine
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import Choice, engine_options, max_tokens_option, sampling_options

if TYPE_CHECKING:
    from rich.progress import Progress

    from draftproof.engine.engine import Engine
    from draftproof.engine.request import Stats

HELP = """Continue PROMPT, or text from stdin, and print the answer as it is generated.

\b
Examples:
  draftproof generate "Why is the sky blue?"
  draftproof generate "Write a haiku" --temperature 0.9 --seed 7 --stats
  cat notes.txt | draftproof generate --max-tokens 100
  draftproof generate "…" --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B
  draftproof generate "…" --rule coupled --seed 7       same text as --drafter none --seed 7, but faster
  draftproof generate --prompts prompts.jsonl > answers.jsonl

Each line of a --prompts file is a JSON string, or an object with "prompt" (a text or a list of chat messages). Other
fields of the object set no options; they are copied to its result. The results are JSON objects, one per line, in the
same order.

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
    help="Use beam search with this many beams instead of sampling and drafting.",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Print speed and acceptance rate to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object instead of streaming text.")
def generate(
    prompt: str | None, prompts: Path | None, choice: Choice, stats: bool, as_json: bool, raw: bool, **rest: Any
) -> int:
    options = {**rest.pop("sampling"), **rest, "stop": list(rest["stop"]), "chat": False if raw else None}
    if prompts is not None:
        if prompt is not None:
            raise click.UsageError("give PROMPT or --prompts, not both")
        items = read_prompts(prompts)
        return answer_all(open_engine(choice), items, options, stats=stats)
    text = _prompt_or_stdin(prompt)
    return answer_one(open_engine(choice), text, options, stats=stats, as_json=as_json)


def _prompt_or_stdin(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError(
            'no prompt: give one as an argument, as in draftproof generate "Why is the sky blue?", or on stdin'
        )
    text = sys.stdin.read().rstrip("\n")
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
    return " · ".join(parts)


def stream_answer(engine: "Engine", prompt: Any, options: dict[str, Any], into: Answer) -> Iterator[str]:
    """Yield the text of each round, which may be empty, and update `into`, so that an interrupt loses nothing."""
    start = time.perf_counter()
    for chunk in engine.stream(prompt, **options):
        into.seconds = time.perf_counter() - start
        into.first_token = into.seconds if into.first_token is None else into.first_token
        into.text += chunk.text
        into.tokens += chunk.tokens
        into.stats = chunk.stats
        into.finish_reason = chunk.finish_reason or into.finish_reason
        yield chunk.text


def answer_one(engine: "Engine", prompt: str, options: dict[str, Any], *, stats: bool, as_json: bool) -> int:
    """Print the answer to one prompt on stdout and return the exit status."""
    answer = Answer()
    status = 0
    try:
        if options["num_beams"] > 1:
            _beam_search(engine, prompt, options, answer)
            if not as_json:
                sys.stdout.write(answer.text)
        else:
            del options["num_beams"]
            with _spinner_if(as_json):
                for piece in stream_answer(engine, prompt, options, answer):
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


def _beam_search(engine: "Engine", prompt: str, options: dict[str, Any], into: Answer) -> None:
    start = time.perf_counter()
    with spinner(f"Searching with {options['num_beams']} beams"):
        output = engine.generate(prompt, **options)
    assert not isinstance(output, list)
    into.text, into.tokens, into.finish_reason = output.text, output.tokens, output.finish_reason
    into.stats, into.seconds = output.stats, time.perf_counter() - start


Item = dict[str, Any]
"""A line of a prompt file: "prompt", and other fields that are copied to its result."""


def read_prompts(path: Path) -> list[Item]:
    """Read a JSON-lines file of prompts; a line that is a string becomes an object with "prompt"."""
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f'{path}, line {number}: not JSON ({error.msg}). A line must be "text" or {{"prompt": …}}'
            ) from None
        item = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), (str, list)):
            raise ValueError(f'{path}, line {number}: must be a JSON string or an object with "prompt"')
        items.append(item)
    if not items:
        raise ValueError(f"{path} contains no prompts")
    return items


def answer_all(engine: "Engine", items: Sequence[Item], options: dict[str, Any], *, stats: bool) -> int:
    """Print one JSON line per prompt, in their order, and return the exit status.

    Lines are written batch by batch, so Ctrl-C loses only the batch in progress.
    """
    start, tokens, failed = time.perf_counter(), 0, 0
    try:
        with _progress() as progress:
            task = progress.add_task("Generating", total=len(items))
            for group in _groups(items, engine.limits.max_batch):
                for result in _results(engine, group, options):
                    tokens += len(result["tokens"])
                    failed += result["finish_reason"] == "error"
                    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
                sys.stdout.flush()
                progress.advance(task, len(group))
    except KeyboardInterrupt:
        return INTERRUPTED
    if stats:
        seconds = time.perf_counter() - start
        speed = f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s)"
        print(f"{len(items)} prompts, {failed} failed · {speed}", file=sys.stderr)
    return 1 if failed else 0


def _results(engine: "Engine", group: Sequence[Item], options: dict[str, Any]) -> Iterator[Item]:
    outputs = engine.generate([item["prompt"] for item in group], **options)
    assert isinstance(outputs, list)
    for item, output in zip(group, outputs, strict=True):
        result = {"text": output.text, "tokens": output.tokens, "finish_reason": output.finish_reason}
        failure = {"error": output.error} if output.error else {}
        yield {**item, **result, **failure, "stats": stats_dict(output.stats)}


def _groups(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _progress() -> "Progress":
    """Return a progress bar on stderr with counts and the elapsed time; it disappears when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
