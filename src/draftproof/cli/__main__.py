"""`python -m draftproof.cli`."""

from draftproof.cli.main import main

main()
