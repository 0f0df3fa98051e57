"""A benchmark from the command line: contestants are made, runs counted on a bar, results shown and kept."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftproof.bench import prompts, results, table
from draftproof.bench.contestants import ours
from draftproof.bench.hosts import hosts
from draftproof.bench.measure import Contestant, Plan, Run, measured
from draftproof.cli.main import INTERRUPTED
from draftproof.cli.opening import open_engine
from draftproof.cli.options import Choice, check_drafter, drafter_of
from draftproof.cli.screen import screen
from draftproof.cli.waiting import progress_bar, waiting
from draftproof.drafters.table import meant
from draftproof.engine.engine import Engine
from draftproof.models.text import encode


@dataclass(frozen=True, slots=True)
class Asked:
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


def bench(asked: Asked) -> int:
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


def _contestants(asked: Asked, plain: Engine) -> list[Contestant]:
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


def _tell(asked: Asked, runs: list[Run]) -> None:
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
        from draftproof.bench.plot import plot

        plot(runs, asked.picture)


def compare(before: Path, after: Path) -> None:
    """How the second results differ from the first, with what else is different beside them."""
    one, other = results.read_results(before), results.read_results(after)
    console = screen()
    console.print(table.comparison(one.runs, other.runs))
    for line in results.differences(one, other):
        console.print(f"not the same: {line}", style="bright_black", markup=False)
