"""`draftproof bench`: measure drafters and rules against plain decoding, by kind of prompt."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import progress_bar, screen, spinner
from draftproof.cli.engines import open_engine
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.options import (
    DEVICE_HELP,
    RULES,
    SAMPLING,
    Choice,
    check_drafter,
    draft_length_option,
    drafter_or_none,
    target_option,
)

if TYPE_CHECKING:
    from draftproof.bench.measure import BenchPlan, Decoder, Run
    from draftproof.engine.engine import Engine

HELP = """Measure how much faster drafters and rules are than plain decoding, on six kinds of prompts.

Every prompt is run by every decoder in turn. Its speedup is the decoder's tokens per second divided by those of plain
decoding, with the time to read the prompt included. The table shows the median over prompts and the quartiles. Ctrl-C
stops early and shows what was measured until then.

\b
Examples:
  draftproof bench --limit 2                                        a quick look, in a few minutes
  draftproof bench --kinds code-editing --drafter ngram --drafter suffix
  draftproof bench --against transformers --save today.json --plot today.png
  draftproof bench --target Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --rule block --rule token
  draftproof bench --compare yesterday.json today.json

At temperature 0, the default, all decoders should give the same text; the column "same text" counts how often they did.
"""


@click.command(help=HELP, short_help="Measure the speedup over plain decoding, by kind of prompt.")
@target_option()
@click.option(
    "--drafter", "drafters", multiple=True, metavar="NAME",
    help="Drafter to measure. Can be given several times. [default: auto, ngram, suffix]",
)  # fmt: skip
@click.option(
    "--draft-model", metavar="MODEL", help="Also measure a smaller draft model: a folder or a Hugging Face model id."
)
@click.option(
    "--rule", "rules", multiple=True, type=click.Choice(RULES),
    help="Rule to measure. Can be given several times. [default: block]",
)  # fmt: skip
@draft_length_option()
@click.option(
    "--against", type=click.Choice(["transformers"]),
    help="Also measure transformers' own generation: plain, prompt lookup and, with --draft-model, assisted.",
)  # fmt: skip
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Your own prompts: a file of JSON lines with "id", "kind" and "prompt".',
)  # fmt: skip
@click.option("--kinds", default="", metavar="A,B", help="Use only these kinds of prompts.")
@click.option("--limit", type=click.IntRange(1), help="Use at most this many prompts of each kind.")
@click.option(
    "--max-tokens", "-n", type=click.IntRange(1), default=64, show_default=True, help="Maximum tokens per answer."
)
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True, help="How often each prompt is measured."
)
@click.option(
    "--temperature",
    type=SAMPLING["temperature"],
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 is greedy decoding.",
)
@click.option("--device", metavar="NAME", help=DEVICE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Save the results as JSON.")
@click.option(
    "--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Save a bar chart of the speedups (PNG)."
)
@click.option(
    "--compare", nargs=2, type=click.Path(exists=True, path_type=Path), metavar="A B",
    help="Measure nothing; compare two files that --save wrote.",
)  # fmt: skip
def bench(compare: tuple[Path, Path] | None, **options: Any) -> int:
    if compare:
        show_comparison(*compare)
        return 0
    return run_bench(BenchSettings(**options))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of `draftproof bench` for a measurement."""

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


def run_bench(settings: BenchSettings) -> int:
    """Measure, show and save the results; return the exit status."""
    from draftproof.bench import prompts
    from draftproof.bench.measure import BenchPlan
    from draftproof.models.tokenizer import encode

    for name in settings.drafters:
        check_drafter(name)
    kinds = [kind for kind in settings.kinds.split(",") if kind]
    chosen = prompts.pick(prompts.read(settings.prompts), kinds, settings.limit)
    # transformers runs the model's own weights; a comparison is between decoders of the same model.
    weights = "auto" if settings.against is None else "float32"
    engine = open_engine(Choice(settings.target, None, device=settings.device, weights=weights))
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"{settings.target} has no tokenizer, which the prompts need: they are text")
    plan = BenchPlan(
        _decoders(settings, engine),
        chosen,
        lambda text: encode(text, tokenizer),
        settings.max_tokens,
        settings.repeats,
        {"temperature": settings.temperature},
    )
    runs: list[Run] = []
    status = _measure(plan, runs)
    _report(settings, runs)
    return status


def _decoders(settings: BenchSettings, plain: "Engine") -> "list[Decoder]":
    """Return the decoders to measure: plain decoding, each drafter under each rule, then those of transformers."""
    from draftproof.bench.engines import engine_decoders, transformers_decoders
    from draftproof.drafters.registry import meant
    from draftproof.engine.load import load

    names = [name for name in settings.drafters or ("auto", "ngram", "suffix") if drafter_or_none(name) is not None]
    drafters: list[tuple[str, Any]] = [
        (name, name) for name in dict.fromkeys(meant(name, plain.loaded) for name in names)
    ]
    draft_tokenizer = None
    if settings.draft_model is not None:
        assistant = open_engine(Choice(settings.draft_model, None, device=settings.device))
        drafters.append((Path(settings.draft_model).name, assistant.loaded))
        draft_tokenizer = assistant.tokenizer
    decoders: list[Decoder] = list(
        engine_decoders(plain, drafters, settings.rules or ("block",), settings.num_draft_tokens, draft_tokenizer)
    )
    if settings.against is None:
        return decoders
    with spinner(f"Loading {settings.target} for transformers"):
        unpacked = load(settings.target, None, device=settings.device, pack=False)
        draft_model = None
        if settings.draft_model:
            draft_model = load(settings.draft_model, None, device=settings.device, pack=False).hf
    return decoders + list(transformers_decoders(unpacked.hf, unpacked.eos, draft_model, settings.num_draft_tokens))


def _measure(plan: "BenchPlan", into: "list[Run]") -> int:
    """Append the runs to `into` as they are measured, so that Ctrl-C loses none; return the exit status."""
    from draftproof.bench.measure import measure

    try:
        with progress_bar() as progress:
            task = progress.add_task("Warming up", total=plan.total)
            for run in measure(plan):
                into.append(run)
                progress.update(task, advance=1, description=f"{run.kind}: {run.contestant}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _report(settings: BenchSettings, runs: "list[Run]") -> None:
    from draftproof.bench.report import Results, machine, plot, table

    if not runs:
        return
    fields = {k: v for k, v in asdict(settings).items() if k not in ("as_json", "save", "picture")}
    results = Results({k: str(v) if isinstance(v, Path) else v for k, v in fields.items()}, machine(), runs)
    if settings.as_json:
        sys.stdout.write(results.as_json())
    else:
        screen().print(table(runs, settings.temperature == 0))
    if settings.save is not None:
        settings.save.write_text(results.as_json(), encoding="utf-8")
    if settings.picture is not None:
        plot(runs, settings.picture)


def show_comparison(before: Path, after: Path) -> None:
    """Show how the speeds of two saved results differ, and which settings and machine facts differ too."""
    from draftproof.bench.report import comparison, differences, read_results

    one, other = read_results(before), read_results(after)
    console = screen()
    console.print(comparison(one.runs, other.runs))
    for line in differences(one, other):
        console.print(f"not the same: {line}", style="bright_black", markup=False)
