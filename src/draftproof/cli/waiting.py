"""Tells on stderr what is being waited for, once it takes longer than anybody likes to wait in silence."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

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
