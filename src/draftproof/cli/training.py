"""A training from the command line: bars while it runs, a table at its end."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftproof.cli.screen import screen
from draftproof.train.budget import PausedError
from draftproof.train.plan import Plan
from draftproof.train.report import table
from draftproof.train.study import Progress as Learnt
from draftproof.train.train import Watch
from draftproof.train.train import train as trained


def train(asked: dict[str, Any], resume: bool, pause_after: float | None) -> int:
    """Train, show what came of it; the status to leave with."""
    plan = Plan(**asked)
    console = Console(stderr=True)
    try:
        with _bars(console) as bars:
            figures = trained(plan, resume=resume, pause=pause_after and 60 * pause_after, watch=_watch(bars))
    except PausedError as paused:
        console.print(str(paused), markup=False)
        return 0
    out = screen()
    if plan.counts:
        out.print(f"Tokens for each pass of {plan.called}, drafts of 4 tokens:", markup=False)
        out.print(table(figures["tokens_per_pass"]), markup=False)
    out.print(f"{plan.out}: load(…, drafter='head:{plan.out}')", markup=False, soft_wrap=True)
    return 0


def _bars(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _watch(bars: Progress) -> Watch:
    tasks = {}

    def stage(name: str, share: float) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=1.0)
        bars.update(tasks[name], completed=share)

    def progress(now: Learnt) -> None:
        stage("training", now.share)
        accepted = " ".join(f"{value:.2f}" for value in now.accepted)
        described = f"training: step {now.steps}, loss {now.loss:.3f}, accepted {accepted}"
        bars.update(tasks["training"], description=described)

    return Watch(stage, progress, lambda line: bars.console.print(line, markup=False))
