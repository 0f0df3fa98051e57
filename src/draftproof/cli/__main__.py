"""Run the command line as `python -m draftproof.cli`."""

from draftproof.cli.main import main

main()
