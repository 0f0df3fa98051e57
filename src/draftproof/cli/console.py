"""Output to the terminal: a console for results on stdout, a spinner and progress bars on stderr.

rich is imported when something is printed, so that `--help` does not pay for it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPED_WIDTH: Final = 120
"""Columns to use when stdout is not a terminal and COLUMNS is not set; rich would assume 80 and cut off tables."""

SILENT_SECONDS: Final = 2.0
"""Seconds after which `spinner` prints its label to a stderr that is not a terminal; shorter work prints nothing."""


def screen() -> "Console":
    """Return a console that prints to stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """Show a spinner with this label on stderr; without a terminal, print one line after SILENT_SECONDS."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{label} …"):
            yield
        return
    line = threading.Timer(SILENT_SECONDS, lambda: console.print(f"{label} …", soft_wrap=True, markup=False))
    line.start()
    try:
        yield
    finally:
        line.cancel()


def progress_bar() -> "Progress":
    """Return a progress bar on stderr with counts and the remaining time; it disappears when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
