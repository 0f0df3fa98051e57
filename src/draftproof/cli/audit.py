"""`draftproof audit`: does a decoder have the target's distribution, and how sure are we?"""

from pathlib import Path
from typing import Any, Final

import click

from draftproof.cli.options import Choice, engine_options

ENGINES: Final = ("draftproof", "transformers", "transformers-assisted", "transformers-lookup", "vllm", "command")

HELP = """Find out whether a decoder draws from the target's law, and say how sure that is.

It continues prompts; the target reads every text and bets are placed against each token, by transformers' own sampling
processors. An exact decoder is called biased with a chance of at most --alpha, whenever the audit stops.

\b
Examples:
  draftproof audit                                             this engine, the bundled model, n-gram drafts
  draftproof audit --drafter head                              drafts of the trained head; bets on its own law
  draftproof audit --drafter early-exit:20 --rule token --sampling temperature=0.8,top_p=0.95
  draftproof audit --engine transformers-assisted --target DIR --draft-model DIR --html audit.html
  draftproof audit --engine command --command "python my_decoder.py" --drafter ngram
  draftproof audit --save audit.json --max-tokens 20000        a beginning
  draftproof audit --resume audit.json --max-tokens 100000     and the rest of it

It leaves with 0 if no bias was found, 1 if the decoder is biased, 2 if the evidence does not suffice. Ctrl-C ends early
and shows what was seen. Models are loaded in float32. A program for --engine command must decode in float32 too; it
reads {"prompt": [ids], "sampling": {…}, "max_tokens": n, "seed": s} and writes {"tokens": [ids]}, a line each.
"""


def sampling_fields(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    """ "temperature=0.8,top_k=50" as the fields of a `Sampling`, whose own checks come later."""
    fields: dict[str, Any] = {}
    for part in filter(None, value.split(",")):
        name, _, number = part.partition("=")
        try:
            fields[name.strip()] = int(number) if name.strip() == "top_k" else float(number)
        except ValueError:
            raise click.BadParameter(f"{part!r} is not NAME=NUMBER, as in temperature=0.8,top_p=0.95") from None
    return fields


@click.command(help=HELP, short_help="Is a decoder's output the target's own? With an error rate.")
@click.option("--engine", type=click.Choice(ENGINES), default="draftproof", show_default=True, help="What is examined.")
@click.option("--command", metavar="TEXT", help="The program of --engine command.")
@engine_options(drafter="ngram")
@click.option(
    "--sampling", metavar="A=X,B=Y", default="temperature=1", show_default=True, callback=sampling_fields,
    help="temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty.",
)  # fmt: skip
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file of your own.")
@click.option("--alpha", type=float, default=1e-6, show_default=True, help="Chance to call an exact decoder biased.")
@click.option("--bias", type=float, default=0.02, show_default=True, help="The smallest mixture that must be found.")
@click.option("--max-tokens", "-n", type=click.IntRange(1), help="Look at most at so many. [200000]")
@click.option("--length", type=click.IntRange(1), help="Tokens a text. [64]")
@click.option("--batch", type=click.IntRange(1), help="Texts asked for at a time. [8]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first text; the others count on.")
@click.option("--ignore-eos", is_flag=True, help="The decoder goes on behind an end token, on purpose.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Keep the certificate as JSON.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the certificate as a page.")
@click.option(
    "--resume", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Go on from a kept certificate, with its prompts and settings; name the same engine.",
)  # fmt: skip
def audit(choice: Choice, **asked: Any) -> int:
    if asked["engine"] == "transformers-assisted" and choice.drafter in (None, "ngram"):
        raise click.UsageError("--engine transformers-assisted needs --draft-model")
    if (asked["engine"] == "command") != (asked["command"] is not None):
        raise click.UsageError("--engine command and --command go together")
    from draftproof.cli import auditing

    return auditing.run(choice, auditing.Asked(**asked))
