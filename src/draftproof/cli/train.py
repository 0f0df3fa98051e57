"""`draftproof train`: a drafting head for a target, taught by the target itself."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftproof.cli.console import screen
from draftproof.train.api import Watch
from draftproof.train.api import train as trained
from draftproof.train.config import PausedError, Plan
from draftproof.train.report import table
from draftproof.train.trainer import Progress as Learnt

HELP = """Train a head that drafts for a target: the target talks to itself, the head learns to guess what it says.

All of it happens here: data, training, and an evaluation in the engine's own loop, within --minutes. A GPU is used
where there is one; a small target also trains on a CPU, in hours. A run that was ended goes on with --resume. A head
that is finished is taught more with --start: a new run on new texts (hence another --seed) begins with its weights.
Its vocabulary may be another, as the output rows are the target's own. The new sheet (head.json) tells the old head's
name, sha256 and command.

\b
Examples:
  draftproof train --target Qwen/Qwen3-0.6B --out heads/qwen3-0.6b --minutes 60
  draftproof train --target Qwen/Qwen3-0.6B --out heads/qwen3-0.6b --minutes 60 --resume
  draftproof train --target Qwen/Qwen3-0.6B --out heads/better --start heads/qwen3-0.6b --seed 1 --vocab 16384
  draftproof generate --target Qwen/Qwen3-0.6B --drafter head:heads/qwen3-0.6b "Why is the sky blue?" --stats

The folder then holds the head (head.safetensors, head.json), its figures (figures.json, acceptance.png), and what a
--resume needs (work/, which may be deleted).
"""


@click.command(help=HELP, short_help="A drafting head for a target, taught by the target itself.")
@click.option("--target", metavar="MODEL", required=True, help="smollm2, a folder or a hub id; decoder-only.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder of the head.")
@click.option("--start", type=click.Path(path_type=Path), help="The folder of a head of this target to begin with.")
@click.option("--minutes", type=float, default=30.0, show_default=True, help="For everything. Kept.")
@click.option("--data", type=float, metavar="SHARE", help="Of the minutes, for texts. [0.25; GPU 0.4, --start 0.34]")
@click.option("--vocab", type=int, help="Tokens the head can say: the most frequent. [8192, or all]")
@click.option("--depth", type=click.IntRange(1), default=5, show_default=True, help="Draft length it is trained for.")
@click.option("--length", type=click.IntRange(32), default=642, show_default=True, help="Tokens of a training text.")
@click.option("--batch", type=click.IntRange(1), default=24, show_default=True, help="Texts of a training step.")
@click.option("--learning-rate", type=float, help="At its height. [0.001; with --start 0.0005]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of data, first weights and order.")
@click.option("--device", metavar="NAME", help="cuda, cpu …; default: CUDA where there is one.")
@click.option("--name", metavar="NAME", help="What people call the target, for the head's sheet.")
@click.option("--licence", metavar="NAME", help="Of the head, for its sheet. [that of the target's weights]")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="For the evaluation.")
@click.option("--counts/--no-counts", default=True, help="Whether to try the head in the engine's loop at the end.")
@click.option("--resume", is_flag=True, help="Go on with what lies in --out.")
@click.option("--pause-after", type=float, metavar="MINUTES", help="Put the work aside then; --resume goes on.")
def train(resume: bool, pause_after: float | None, **asked: Any) -> int:
    return run_training({k: v for k, v in asked.items() if v is not None}, resume, pause_after)


def run_training(asked: dict[str, Any], resume: bool, pause_after: float | None) -> int:
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
