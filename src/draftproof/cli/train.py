"""`draftproof train`: train a drafting head for a target on texts that the target generates."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli.console import screen
from draftproof.cli.options import DEVICE_HELP
from draftproof.train.config import EXPORT_FORMATS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from draftproof.train.api import Watch
    from draftproof.train.trainer import Progress as TrainingProgress

HELP = """Train a drafting head for a target: the target generates texts, and the head learns to predict them.

The command generates the data, trains the head and evaluates it, all within --minutes. It uses a GPU if there is one; a
head for a small target can also be trained on a CPU, in hours.

--resume continues a run that was stopped. --start trains a finished head further: the new run begins with its weights
and needs another --seed, so that it trains on new texts. It may have another vocabulary size. The new head.json records
the name, SHA-256 and command of the head it started from.

\b
Examples:
  draftproof train --target Qwen/Qwen3-0.6B --out heads/qwen3-0.6b --minutes 60
  draftproof train --target Qwen/Qwen3-0.6B --out heads/qwen3-0.6b --minutes 60 --resume
  draftproof train --target Qwen/Qwen3-0.6B --out heads/qwen3-0.6b --minutes 60 --export speculators
  draftproof train --target Qwen/Qwen3-0.6B --out heads/better --start heads/qwen3-0.6b --seed 1 --vocab 16384
  draftproof generate --target Qwen/Qwen3-0.6B --drafter head:heads/qwen3-0.6b "Why is the sky blue?" --stats

The output folder contains the head (head.safetensors, head.json), its results (figures.json, acceptance.png), and the
files that --resume needs (work/, which you may delete).

A head that was trained too briefly does not help: the command then says so and how long to train. The finished run is
continued with --resume and more --minutes.
"""


@click.command(help=HELP, short_help="Train a drafting head for a target.")
@click.option(
    "--target", metavar="MODEL", required=True,
    help="Target model: smollm2, a folder or a Hugging Face model id. It must be decoder-only.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the head to.")
@click.option(
    "--start", type=click.Path(path_type=Path), help="Folder of a head for the same target whose weights to start with."
)
@click.option(
    "--minutes", type=float, default=30.0, show_default=True,
    help="Time limit for the whole run: data, training and evaluation.",
)  # fmt: skip
@click.option(
    "--data", type=float, metavar="SHARE",
    help="Share of the time spent on generating texts. [default: 0.25; on a GPU 0.4, or 0.34 with --start]",
)  # fmt: skip
@click.option(
    "--vocab", type=int,
    help="Number of tokens the head can draft, the most frequent ones. [default: 8192, or all if the target has fewer]",
)  # fmt: skip
@click.option(
    "--depth", type=click.IntRange(1), default=5, show_default=True, help="Draft length that the head is trained for."
)
@click.option("--length", type=click.IntRange(32), default=642, show_default=True, help="Tokens per training text.")
@click.option("--batch", type=click.IntRange(1), default=24, show_default=True, help="Texts per training step.")
@click.option("--learning-rate", type=float, help="Peak learning rate. [default: 0.001; with --start 0.0005]")
@click.option(
    "--seed", type=int, default=0, show_default=True,
    help="Random seed for the texts, the initial weights and the training order.",
)  # fmt: skip
@click.option("--device", metavar="NAME", help=DEVICE_HELP)
@click.option("--name", metavar="NAME", help="Name of the target to record in head.json. [default: from --target]")
@click.option(
    "--licence",
    metavar="NAME",
    help="Licence of the head to record in head.json. [default: that of the target's weights]",
)
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts for the evaluation, in the format of `draftproof bench --prompts`.",
)  # fmt: skip
@click.option("--counts/--no-counts", default=True, help="Whether to measure tokens per pass in the engine at the end.")
@click.option(
    "--export", type=click.Choice(EXPORT_FORMATS),
    help="Also write the head in this format, which vLLM serves, to a folder of this name in --out. Such a head reads "
    "other layers of the target; a head trained without this option cannot be exported.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue the run in the folder --out.")
@click.option(
    "--pause-after", type=float, metavar="MINUTES", help="Stop after this time; --resume continues the run later."
)
def train(resume: bool, pause_after: float | None, **options: Any) -> int:
    return run_training({name: value for name, value in options.items() if value is not None}, resume, pause_after)


def run_training(options: dict[str, Any], resume: bool, pause_after: float | None) -> int:
    """Train a head, show its evaluation and return the exit status."""
    from rich.console import Console

    from draftproof.train import api
    from draftproof.train.config import PausedError, TrainConfig
    from draftproof.train.report import summary

    config = TrainConfig(**options)
    console = Console(stderr=True)
    try:
        with _progress(console) as progress:
            figures = api.train(config, resume=resume, pause=pause_after and 60 * pause_after, watch=_watch(progress))
    except PausedError as paused:
        console.print(str(paused), markup=False)
        return 0
    out = screen()
    if config.counts:
        out.print(f"Tokens per pass of {config.target_name}, with drafts of 4 tokens:", markup=False)
    out.print(summary(figures), markup=False, soft_wrap=True)
    usage = f": load it with load(…, drafter='head:{config.out}')" if figures["verdict"]["helps"] else ""
    out.print(f"The head is in {config.out}{usage}", markup=False, soft_wrap=True)
    if config.export:
        out.print(f"In the format of {config.export} it is in {config.exported}", markup=False, soft_wrap=True)
    return 0


def _progress(console: "Console") -> "Progress":
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _watch(bars: "Progress") -> "Watch":
    """Return callbacks for `api.train` that show a bar for each stage and print its messages."""
    from draftproof.train.api import Watch

    tasks = {}

    def stage(name: str, share: float) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=1.0)
        bars.update(tasks[name], completed=share)

    def progress(now: "TrainingProgress") -> None:
        stage("training", now.share)
        accepted = " ".join(f"{value:.2f}" for value in now.accepted)
        description = f"training: step {now.steps}, loss {now.loss:.3f}, accepted {accepted}"
        bars.update(tasks["training"], description=description)

    return Watch(stage, progress, lambda line: bars.console.print(line, markup=False))
