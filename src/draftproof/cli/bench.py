"""`draftproof bench`: how fast, on which kind of text, against what."""

from pathlib import Path
from typing import Any

import click

from draftproof.cli.options import RULES, draft_length_option

HELP = """Measure drafters and rules against plain decoding, on six kinds of prompts, in alternation.

A speedup is that of one prompt: tokens a second over those of plain decoding in the same run, the time for the prompt
counted. Shown are the median over prompts and its quartiles. Ctrl-C ends early and shows what was measured.

\b
Examples:
  draftproof bench --limit 2                                        a first impression, some minutes
  draftproof bench --kinds code-editing --drafter ngram --drafter suffix
  draftproof bench --against transformers --save today.json --plot today.png
  draftproof bench --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --rule block --rule token
  draftproof bench --compare yesterday.json today.json

At temperature 0, the default, all contestants should say the same: "same text" counts it.
"""


@click.command(help=HELP, short_help="Speed against plain decoding, by kind of text; also transformers'.")
@click.option("--target", metavar="MODEL", default="smollm2", show_default=True, help="smollm2, a folder or a hub id.")
@click.option(
    "--drafter", "drafters", multiple=True, metavar="NAME", help="May be given several times. [auto, ngram, suffix]"
)
@click.option("--draft-model", metavar="MODEL", help="Also a smaller model: a folder or a hub id.")
@click.option("--rule", "rules", multiple=True, type=click.Choice(RULES), help="May be given several times. [block]")
@draft_length_option()
@click.option(
    "--against", type=click.Choice(["transformers"]), help="Also its plain, assisted, prompt-lookup generation."
)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file of your own.")
@click.option("--kinds", default="", metavar="A,B", help="Only these kinds of prompts.")
@click.option("--limit", type=click.IntRange(1), help="At most so many prompts of a kind.")
@click.option("--max-tokens", "-n", type=click.IntRange(1), default=64, show_default=True, help="Tokens an answer.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Every prompt so many times.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--device", metavar="NAME", help="cuda, cpu …; default: CUDA where there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Keep the results as JSON.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the speedups (PNG).")
@click.option(
    "--compare", nargs=2, type=click.Path(exists=True, path_type=Path), metavar="A B", help="Compare two kept results."
)
def bench(compare: tuple[Path, Path] | None, **asked: Any) -> int:
    from draftproof.cli import benching

    if compare:
        benching.compare(*compare)
        return 0
    return benching.bench(benching.Asked(**asked))
