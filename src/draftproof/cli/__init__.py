"""The `draftproof` command line, with one file for each command; `main` is the entry point."""

from draftproof.cli.main import main

__all__ = ["main"]
