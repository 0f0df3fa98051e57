"""Tells on stderr what is being waited for, once it takes longer than anybody likes to wait in silence."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

PIPED_WIDTH: Final = 120
"""Columns where nobody says how many there are."""


def screen() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


PATIENCE: Final = 2.0


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """A spinner on a terminal; elsewhere one line after PATIENCE seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{label} …"):
            yield
        return
    line = threading.Timer(PATIENCE, lambda: console.print(f"{label} …", soft_wrap=True, markup=False))
    line.start()
    try:
        yield
    finally:
        line.cancel()


def progress_bar() -> Progress:
    """A bar on stderr that is gone when it is done: how many of how many, and how long still."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
