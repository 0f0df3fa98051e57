"""Where commands write: colours and the width of the terminal on one, plain text and room for tables elsewhere."""

import os
from typing import Final

from rich.console import Console

PIPED_WIDTH: Final = 120
"""Columns where nobody says how many there are."""


def screen() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console
