"""`draftproof demo`: what speculative decoding is and does, in a minute, on your own machine."""

from pathlib import Path

import click

HELP = """Answer two prompts with plain and with speculative decoding, side by side; then explain one round.

Writes a page to step through (demo/explain.html) and says what to try next.
"""


@click.command(help=HELP, short_help="Plain and speculative side by side, and one round explained.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo"), show_default=True)
@click.option("--target", metavar="MODEL", default="smollm2", show_default=True, help="smollm2, a folder or a hub id.")
@click.option("--max-tokens", "-n", type=click.IntRange(1), default=160, show_default=True, help="Most tokens to say.")
def demo(out: Path, target: str, max_tokens: int) -> None:
    from draftproof.cli.showing import show

    show(out, target, max_tokens)
