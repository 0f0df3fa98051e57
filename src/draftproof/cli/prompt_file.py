"""Work through a file of prompts, one JSON value per line with the options it sets for itself, one JSON result each."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import switch_off_zero
from draftproof.cli.text import check_text, read_lines

if TYPE_CHECKING:
    from rich.progress import Progress

    from draftproof.cli.generate import Options
    from draftproof.engine.engine import Engine

Item = dict[str, Any]
"""The JSON object of a line: "prompt" and other fields, which its result repeats."""

SAMPLING_FIELDS: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed",
)  # fmt: skip
"""The fields of `SamplingParams`, repeated here because importing it imports torch."""

LINE_OPTIONS: Final = ("max_tokens", "stop", *SAMPLING_FIELDS)
"""The options that a line may set."""

OTHER_OPTIONS: Final = (
    "allowed", "best_of", "chat", "device", "do_sample", "draft_model", "drafter", "eos_token_id", "grammar",
    "ignore_eos", "json_schema", "length_penalty", "logprobs", "max_completion_tokens", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "min_tokens", "model", "n", "no_repeat_ngram_size", "num_beams", "num_draft_tokens",
    "raw", "response_format", "rule", "stop_sequences", "stop_strings", "stop_token_ids", "stops", "target", "top_a",
    "top_logprobs", "typical_p",
)  # fmt: skip
"""Names of options, here or in other libraries, that a line cannot set. Its result would repeat them as if applied."""

MISSPELT: Final = 0.9
"""Similarity (difflib's ratio) from which a field counts as a misspelt option: "temprature" has 0.95."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of a prompt file. Options that it does not set are None, or missing in `sampling`."""

    item: Item
    sampling: dict[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...] | None
    source: str
    """The file and the line number, for error messages."""


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Read the prompts of a file with their options; refuse options that are wrong or unknown."""
    return [_line(item, source) for source, item in _items(path)]


def read_prompts(path: Path) -> list[Item]:
    """Read the prompts of a file, whatever their other fields are."""
    return [item for _, item in _items(path)]


def _items(path: Path) -> Iterator[tuple[str, Item]]:
    """Yield the file's objects with their places; a line that is a string becomes an object with "prompt"."""
    found = 0
    for number, line in read_lines(path):
        source = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f'{source}: not JSON ({error.msg}). A line must be "text" or {{"prompt": …}}') from None
        item = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), (str, list)):
            raise ValueError(f'{source}: must be a JSON string or an object with "prompt"')
        check_text(json.dumps(item, ensure_ascii=False), source)
        found += 1
        yield source, item
    if not found:
        raise ValueError(f"{path} contains no prompts")


def _line(item: Item, source: str) -> PromptLine:
    for name in item:
        _check_field(name, source)
    given = {name: item[name] for name in LINE_OPTIONS if item.get(name) is not None}
    max_tokens, stop = given.pop("max_tokens", None), given.pop("stop", None)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 0):
        raise ValueError(f"{source}: max_tokens must be a whole number ≥ 0; got {max_tokens!r}")
    return PromptLine(item, _sampling(given, source), max_tokens, _stops(stop, source), source)


def _check_field(name: str, source: str) -> None:
    """Refuse a field that is the name of an option, or nearly, but not one that a line can set."""
    if name in LINE_OPTIONS:
        return
    plain = name.lower().replace("-", "_")
    squeezed = {option.replace("_", ""): option for option in LINE_OPTIONS}
    near = get_close_matches(plain.replace("_", ""), squeezed, n=1, cutoff=MISSPELT)
    if not near and plain not in OTHER_OPTIONS:
        return
    hint = f' (did you mean "{squeezed[near[0]]}"?)' if near else ""
    raise ValueError(
        f'{source}: "{name}" looks like an option, but a line cannot set it{hint}. It can set '
        f'{", ".join(LINE_OPTIONS)}; put fields that are only to be repeated in the result into "metadata"'
    )


def _sampling(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return sampling fields as `SamplingParams` takes them; it checks their ranges."""
    if not given:
        return {}
    from draftproof.core.sampling import SamplingParams

    try:
        fields = switch_off_zero({name: _value(name, value) for name, value in given.items()})
        SamplingParams(**fields)
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).replace('None (off)', '0 (off)').replace('None', 'null')}") from None
    return fields


def _value(name: str, value: Any) -> Any:
    """Return the value of a sampling field; refuse one of the wrong type."""
    if name == "logit_bias":
        return _bias(value)
    whole = name in ("top_k", "seed")
    if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a {'whole number' if whole else 'number'}; got {value!r}")
    return value


def _bias(bias: Any) -> dict[int, int | float]:
    """Return a logit bias with token ids in place of JSON's string keys."""
    if not isinstance(bias, dict) or not all(key.isdecimal() for key in bias):
        raise ValueError(f'logit_bias must be an object of token ids and numbers, as in {{"42": -5}}; got {bias!r}')
    return {int(token): _value(f"logit_bias of token {token}", value) for token, value in bias.items()}


def _stops(stop: Any, source: str) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"{source}: stop must be a text that is not empty, or a list of such texts; got {stop!r}")
    return tuple(stops)


def answer_all(engine: "Engine", lines: Sequence[PromptLine], options: "Options", *, stats: bool) -> int:
    """Print one JSON line per prompt, in their order, and return the exit status.

    Lines are written batch by batch, so Ctrl-C loses only the batch in progress.
    """
    start, tokens, failed = time.perf_counter(), 0, 0
    try:
        with _progress() as progress:
            task = progress.add_task("Generating", total=len(lines))
            for group in _groups(lines, engine.limits.max_batch):
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
        print(f"{len(lines)} prompts, {failed} failed · {speed}", file=sys.stderr)
    return 1 if failed else 0


def _results(engine: "Engine", group: Sequence[PromptLine], options: "Options") -> Iterator[Item]:
    from draftproof.cli.generate import lossy_fields, stats_dict  # which imports this file

    outputs = engine.generate([line.item["prompt"] for line in group], **options.for_lines(engine, group))
    assert isinstance(outputs, list)
    for line, output in zip(group, outputs, strict=True):
        result = {"text": output.text, "tokens": output.tokens, "finish_reason": output.finish_reason}
        failure = {"error": output.error} if output.error else {}
        yield {**line.item, **result, **failure, **lossy_fields(output), "stats": stats_dict(output.stats)}


def _groups(lines: Sequence[PromptLine], size: int) -> Iterator[Sequence[PromptLine]]:
    """Split the lines, in their order, into batches of at most this size; a batch has the same stop texts."""
    for _, same in groupby(lines, key=lambda line: line.stop):
        run = list(same)
        for start in range(0, len(run), size):
            yield run[start : start + size]


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
