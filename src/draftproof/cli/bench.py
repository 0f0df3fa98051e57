"""`draftproof bench`: how fast, on which kind of text, against what."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from draftproof.bench import prompts
from draftproof.bench import report as results
from draftproof.bench import report as table
from draftproof.bench.engines import hosts, ours
from draftproof.bench.measure import Contestant, Plan, Run, measured
from draftproof.cli.console import progress_bar, screen, waiting
from draftproof.cli.engines import open_engine
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import RULES, Choice, check_drafter, draft_length_option, drafter_of
from draftproof.drafters.registry import meant
from draftproof.engine.engine import Engine
from draftproof.models.tokenizer import encode

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
    if compare:
        show_comparison(*compare)
        return 0
    return run_bench(BenchSettings(**asked))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The command's options."""

    target: str
    drafters: tuple[str, ...]
    draft_model: str | None
    rules: tuple[str, ...]
    num_draft_tokens: int | str
    against: str | None
    prompts: Path | None
    kinds: str
    limit: int | None
    max_tokens: int
    repeats: int
    temperature: float
    device: str | None
    as_json: bool
    save: Path | None
    picture: Path | None


def run_bench(asked: BenchSettings) -> int:
    """Measure, show, keep; the status to leave with."""
    for name in asked.drafters:
        check_drafter(name)
    chosen = prompts.pick(prompts.read(asked.prompts), [k for k in asked.kinds.split(",") if k], asked.limit)
    engine = open_engine(Choice(asked.target, None, device=asked.device))
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"{asked.target} has no tokenizer, and the prompts are text")
    plan = Plan(
        _contestants(asked, engine),
        chosen,
        lambda text: encode(text, tokenizer),
        asked.max_tokens,
        asked.repeats,
        {"temperature": asked.temperature},
    )
    runs: list[Run] = []
    status = _measure(plan, runs)
    _tell(asked, runs)
    return status


def _contestants(asked: BenchSettings, plain: Engine) -> list[Contestant]:
    names = [name for name in asked.drafters or ("auto", "ngram", "suffix") if drafter_of(name) is not None]
    drafters: list[tuple[str, Any]] = [(name, name) for name in dict.fromkeys(meant(name, plain.hf) for name in names)]
    draft_model = None
    if asked.draft_model is not None:
        draft_model = open_engine(Choice(asked.draft_model, None, device=asked.device)).hf
        drafters.append((Path(asked.draft_model).name, draft_model))
    made: list[Contestant] = list(ours(plain, drafters, asked.rules or ("block",), asked.num_draft_tokens))
    if asked.against is None:
        return made
    from draftproof.engine.load import load

    with waiting(f"Loading {asked.target} for transformers"):
        unpacked = load(asked.target, None, device=asked.device, pack=False)
        theirs = load(asked.draft_model, None, device=asked.device, pack=False).hf if asked.draft_model else None
    return made + list(hosts(unpacked.hf, unpacked.eos, theirs, asked.num_draft_tokens))


def _measure(plan: Plan, into: list[Run]) -> int:
    try:
        with progress_bar() as progress:
            task = progress.add_task("Warming up", total=plan.total)
            for run in measured(plan):
                into.append(run)
                progress.update(task, advance=1, description=f"{run.kind}: {run.contestant}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _tell(asked: BenchSettings, runs: list[Run]) -> None:
    if not runs:
        return
    settings = {k: v for k, v in asdict(asked).items() if k not in ("as_json", "save", "picture")}
    made = results.Results(
        {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}, results.machine(), runs
    )
    if asked.as_json:
        sys.stdout.write(made.as_json())
    else:
        screen().print(table.table(runs, asked.temperature == 0))
    if asked.save is not None:
        asked.save.write_text(made.as_json(), encoding="utf-8")
    if asked.picture is not None:
        from draftproof.bench.report import plot

        plot(runs, asked.picture)


def show_comparison(before: Path, after: Path) -> None:
    """How the second results differ from the first, with what else is different beside them."""
    one, other = results.read_results(before), results.read_results(after)
    console = screen()
    console.print(table.comparison(one.runs, other.runs))
    for line in results.differences(one, other):
        console.print(f"not the same: {line}", style="bright_black", markup=False)
