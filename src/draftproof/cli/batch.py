"""A file of prompts: some at a time, each result a JSON line as soon as it is there."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftproof.cli.main import INTERRUPTED
from draftproof.cli.streaming import stats_dict
from draftproof.engine.engine import Engine

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
