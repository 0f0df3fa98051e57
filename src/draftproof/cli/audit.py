"""`draftproof audit`: does a decoder have the target's distribution, and how sure are we?"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch

from draftproof.auditor import api
from draftproof.auditor import settings as earlier
from draftproof.auditor.api import MOST_TOKENS
from draftproof.auditor.certificate import Certificate, number
from draftproof.auditor.decoders import maker
from draftproof.auditor.interface import Decoder
from draftproof.cli.console import progress_bar, screen, waiting
from draftproof.cli.engines import open_engine
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import Choice, engine_options
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.registry import is_name, meant
from draftproof.engine.engine import Engine
from draftproof.models.tokenizer import encode

ENGINES: Final = ("draftproof", "transformers", "transformers-assisted", "transformers-lookup", "vllm", "command")

HELP = """Find out whether a decoder draws from the target's distribution, and say how sure that is.

It continues prompts; the target reads every text and bets are placed against each token, by transformers' own sampling
processors. An exact decoder is called biased with a chance of at most --alpha, whenever the audit stops.

\b
Examples:
  draftproof audit                                             this engine, the bundled model, n-gram drafts
  draftproof audit --drafter head                              drafts of the trained head; bets on its own distribution
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
    """ "temperature=0.8,top_k=50" as the fields of a `SamplingParams`, whose own checks come later."""
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
    return run_audit(choice, AuditSettings(**asked))


PRECISION: Final = torch.float32
"""On every device: in bfloat16 rounding moves a probability by a tenth, and a bias below that would not be seen."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The command's options."""

    engine: str
    command: str | None
    sampling: dict[str, Any]
    prompts: Path | None
    alpha: float
    bias: float
    max_tokens: int | None
    length: int | None
    batch: int | None
    seed: int
    ignore_eos: bool
    as_json: bool
    save: Path | None
    html: Path | None
    resume: Path | None


def run_audit(choice: Choice, asked: AuditSettings) -> int:
    """Audit, show, keep; the status to leave with."""
    sampling = _sampling(asked.sampling)
    kept = Certificate.load(asked.resume) if asked.resume is not None else None
    engine = _opened(choice, asked.engine)
    how = _arguments(asked, sampling, engine, kept)
    drafter = _drafter(choice, engine)
    decoder = _decoder(choice, asked, engine, drafter)
    with_drafter = {**how, "drafter": drafter, "resume": kept}
    certificate, interrupted = _watched(decoder, engine, with_drafter)
    if certificate is not None:
        _tell(asked, certificate)
    return INTERRUPTED if interrupted or certificate is None else certificate.exit_code


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except TypeError:
        raise ValueError(f"--sampling does not know one of {', '.join(fields)}") from None


def _arguments(
    asked: AuditSettings, sampling: SamplingParams, engine: Engine, kept: Certificate | None
) -> dict[str, Any]:
    """What `audit` takes; of a certificate to resume all but how far to go."""
    if kept is not None:
        arguments = earlier.AuditRequest.from_dict(kept.asked).arguments()
        return {**arguments, "max_tokens": asked.max_tokens or arguments["max_tokens"]}
    names = ("alpha", "bias", "max_tokens", "length", "batch", "seed")
    prompts = _prompts(asked.prompts, engine)
    ends = () if asked.ignore_eos else tuple(sorted(engine.eos))
    return {"prompts": prompts, "sampling": sampling, "ends": ends, **{name: getattr(asked, name) for name in names}}


def _prompts(path: Path | None, engine: Engine) -> list[list[int]]:
    from draftproof.bench import prompts
    from draftproof.cli.generate import read_prompts

    if engine.tokenizer is None:
        raise ValueError("the target has no tokenizer, and the prompts are text")
    items = [p.prompt for p in prompts.read()] if path is None else [item["prompt"] for item in read_prompts(path)]
    return [encode(item, engine.tokenizer) for item in items]


def _opened(choice: Choice, engine: str) -> Engine:
    """The target, in this engine or on its own. Hosts get it as they lay it out."""
    if engine == "draftproof":
        return open_engine(choice, dtype=PRECISION)
    from draftproof.cli.engines import prepare, quiet_hosts
    from draftproof.engine.load import load

    prepare(Choice(choice.target, None))
    with waiting(f"Loading {choice.target}"):
        quiet_hosts()
        return load(choice.target, None, device=choice.device, dtype=PRECISION, pack=False)


def _drafter(choice: Choice, engine: Engine) -> Any:
    """What the bets know of the drafter: a model, or by its name a head, or that drafts are copied."""
    name = choice.drafter
    if name is None:
        return None
    if name.startswith("early-exit:"):
        cut: Any = engine.model
        return cut.first_layers(int(name.partition(":")[2]))
    if is_name(name):
        return meant(name, engine.hf)
    return open_engine(Choice(name, None, device=choice.device), dtype=PRECISION).hf


def _decoder(choice: Choice, asked: AuditSettings, engine: Engine, drafter: Any) -> Decoder:
    length = choice.num_draft_tokens if isinstance(choice.num_draft_tokens, int) else None
    if asked.engine == "draftproof":
        return engine
    if asked.engine == "command":
        return maker("command")(shlex.split(asked.command or ""))
    if asked.engine == "vllm":
        return maker("vllm")(choice.target, choice.drafter, draft_length=length or 3)
    if asked.engine == "transformers-assisted":
        return maker("transformers_assisted")(engine.hf, drafter)
    if asked.engine == "transformers-lookup":
        return maker("transformers_lookup")(engine.hf, *([length] if length else []))
    return maker("transformers_plain")(engine.hf)


def _watched(decoder: Decoder, engine: Engine, how: dict[str, Any]) -> tuple[Certificate | None, bool]:
    """The last certificate there is, and whether Ctrl-C made it the last."""
    seen: list[Certificate] = []
    with progress_bar() as progress:
        task = progress.add_task("Listening", total=how["max_tokens"] or MOST_TOKENS)

        def watch(certificate: Certificate) -> None:
            seen[:] = [certificate]
            words = f"evidence {number(certificate.log_evidence)}, {certificate.coverage.rejected:,.0f} rejections"
            progress.update(task, completed=certificate.tokens, description=words)

        try:
            api.audit(decoder, engine.hf, **how, watch=watch)
        except KeyboardInterrupt:
            return (seen[0] if seen else None), True
    return seen[0], False


def _tell(asked: AuditSettings, certificate: Certificate) -> None:
    if asked.as_json:
        sys.stdout.write(certificate.as_json())
    else:
        screen().print(str(certificate), markup=False, soft_wrap=True)
    if asked.save is not None:
        certificate.save(asked.save)
    if asked.html is not None:
        certificate.to_html(asked.html)
