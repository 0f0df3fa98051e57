"""The command line. A file a command; `main` is the door."""

from draftproof.cli.main import main

__all__ = ["main"]
