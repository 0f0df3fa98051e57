"""Shows on stderr how far a long piece of work has got. Knows nothing of what the work is."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID

Report = Callable[[str, int, int], None]
"""Stage, how much of it is done, how much there is."""

PATIENCE: Final = 2.0
"""Seconds of silence that nobody minds: work shorter than that leaves no trace in a log."""


def reporting(shown: bool) -> AbstractContextManager[Report]:
    """A bar for each stage on a terminal; elsewhere a line for each, once the work has taken PATIENCE."""
    console = Console(stderr=True)
    if not shown:
        return nullcontext(_silent)
    return _bars(console) if console.is_terminal else nullcontext(_lines(console))


def _silent(stage: str, done: int, total: int) -> None:
    pass


@contextmanager
def _bars(console: Console) -> Iterator[Report]:
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield report


def _lines(console: Console) -> Report:
    start, said = time.monotonic(), set[str]()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in said and time.monotonic() - start > PATIENCE:
            said.add(stage)
            console.print(f"{stage} …", soft_wrap=True)

    return report
