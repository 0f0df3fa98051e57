"""Train the shipped head on a GPU machine without network; the model's file is copied there in two halves.

    split -n 2 SmolLM2-135M-Instruct.Q4_1.gguf build/model/part-        # halves under build/, which git ignores
    PYTHONPATH=src python3 benchmarks/train_on_gpu.py --depth 4 --out DIR --until $(($(date +%s) + 585))
    PYTHONPATH=src python3 benchmarks/train_on_gpu.py --depth 4 --out DIR --until $(($(date +%s) + 345)) \\
        --start build/start --seed 1 --vocab 16384 --no-counts          # continue the head in build/start

Joins and converts the halves, trains (`draftproof train`), counts tokens per target pass (benchmarks/head.py), and
copies head, figures and counts to DIR: the head as soon as it has been trained. A command that was interrupted resumes
when it is given again. Counts are the same on any machine and may be made on another one (--no-counts). --profile 10
first profiles the steps of a training (benchmarks/train_steps.py), in half a minute.
"""

import argparse
import dataclasses
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from draftproof.models import bundled
from draftproof.models.bundled.download import sha256
from draftproof.models.bundled.gguf import convert
from draftproof.train.api import Watch, train
from draftproof.train.config import PausedError, RunFolder, TrainConfig
from draftproof.train.report import table
from draftproof.train.trainer import Progress

START = time.monotonic()
STARTING_SECONDS = 20.0
"""Seconds until the counting process has loaded its model."""

SHORTEST_COUNT, LONGEST_COUNT = 45.0, 160.0
"""Seconds for the counts: with fewer they are not begun, more are not given."""

LEAVING_SECONDS = 8.0
"""Seconds for the last step, the plot and the copies, after the time that a training was given."""

UNLIMITED_MINUTES = 10.5
"""Minutes of a training if neither --minutes nor --until is given."""

RESULT_FILES = ("head.safetensors", "head.json", "figures.json", "acceptance.png", "passes.json")
REPORT_SECONDS = 10.0
"""Seconds between two lines about the same stage."""

PROFILE_SECONDS = 60.0
"""Seconds after which the profile is stopped."""


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {line}", flush=True)


def target(halves: Path, folder: Path) -> Path:
    """Convert the halves of the bundled model's file into a folder that transformers reads, and return it."""
    if folder.exists():
        return folder
    whole = halves / "whole.gguf"
    with whole.open("wb") as file:
        for part in sorted(halves.glob("part-*")):
            file.write(part.read_bytes())
    found = sha256(whole)
    if found != bundled.SOURCE.sha256:
        raise SystemExit(
            f"{halves} holds {found}, not the bundled model {bundled.SOURCE.sha256}: are both halves there?"
        )
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    convert(whole, unfinished, lambda done, total: None)
    unfinished.rename(folder)
    return folder


def train_config(options: argparse.Namespace, model: Path) -> TrainConfig:
    """Return the training's options, with the minutes arguments for or those left until the command must end."""
    config = TrainConfig(
        target=str(model), out=options.head, start=options.start, minutes=options.minutes or UNLIMITED_MINUTES,
        data=options.data, counts=not options.no_counts, vocab=options.vocab, depth=options.depth, seed=options.seed,
        length=options.length, learning_rate=options.learning_rate, device=options.device,
        name="SmolLM2-135M-Instruct", licence="Apache-2.0, as SmolLM2-135M-Instruct",
    )  # fmt: skip
    if options.minutes or options.until == math.inf:
        return config
    left = options.until - time.time() - LEAVING_SECONDS - (LONGEST_COUNT if config.counts else 0.0)
    spent = RunFolder(options.head / "work", config).spent
    return dataclasses.replace(config, minutes=round((spent + left) / 60, 2))


def watch() -> Watch:
    """Return callbacks that print the progress, one line per stage and REPORT_SECONDS."""
    last = {"": -REPORT_SECONDS}

    def rarely(stage: str, line: str) -> None:
        if time.monotonic() - last.get(stage, -REPORT_SECONDS) >= REPORT_SECONDS:
            last[stage] = time.monotonic()
            say(line)

    def progress(now: Progress) -> None:
        accepted = " ".join(f"{value:.3f}" for value in now.accepted)
        step_time = f"{now.step_ms:.1f} ms per step"
        line = f"training {now.share:.0%}, step {now.steps}, {step_time}, loss {now.loss:.3f}, accepted {accepted}"
        rarely("training", line)

    return Watch(lambda stage, share: rarely(stage, f"{stage} {share:.0%}"), progress, say)


def count(model: Path, head: Path, device: str, seconds: float) -> None:
    """Count tokens per target pass by running benchmarks/head.py, which has seven cells, in another process."""
    options = ["--only-passes", "--device", device, "--target", str(model), "--head", str(head)]
    options += ["--seconds-a-cell", f"{(seconds - STARTING_SECONDS) / 7:.1f}", "--out", str(head / "passes.json")]
    torch.cuda.empty_cache()  # cached blocks of this process would be missing in the other
    _run_program("head.py", options, seconds)


def profile(model: Path, options: argparse.Namespace) -> None:
    """Profile the training steps in another process, which frees its GPU memory when it ends."""
    arguments = ["--target", str(model), "--device", options.device, "--steps", str(options.profile), "--data"]
    arguments += ["--depth", str(options.depth), "--length", str(options.length)]
    arguments += ["--vocab", str(options.vocab)] if options.vocab else []
    _run_program("train_steps.py", arguments, PROFILE_SECONDS)


def _run_program(program: str, options: list[str], seconds: float) -> None:
    """Run a program of this folder, and stop it after this many seconds."""
    try:
        subprocess.run([sys.executable, str(Path(__file__).with_name(program)), *options], check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        say(f"{program} was stopped after {seconds:.0f} seconds")


def copy_results(head: Path, out: Path) -> None:
    """Copy the result files that exist."""
    out.mkdir(parents=True, exist_ok=True)
    for name in RESULT_FILES:
        if (head / name).exists():
            shutil.copy(head / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"), help="made from the halves if missing")
    parser.add_argument("--halves", type=Path, default=Path("build/model"))
    parser.add_argument("--head", type=Path, default=Path("build/head"))
    parser.add_argument("--start", type=Path, help="the folder of a head to continue")
    parser.add_argument(
        "--minutes",
        type=float,
        help="for data, training and evaluation, over all commands; default: the time until --until",
    )
    parser.add_argument("--until", type=float, default=math.inf, help="when this command must have ended, as date +%%s")
    parser.add_argument("--data", type=float, help="share of the minutes for texts")
    parser.add_argument("--no-counts", action="store_true", help="do not count tokens per target pass")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--length", type=int, default=642)
    parser.add_argument("--depth", type=int, default=5, help="draft length it is trained for")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="first N steps of each kind, profiled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = target(options.halves, options.model)
    say(f"target in {model}")
    if options.profile:
        profile(model, options)
    try:
        if not (options.head / "figures.json").exists():
            run_training(train_config(options, model), options)
            copy_results(options.head, options.out)
        if not options.no_counts:
            count_if_time(model, options)
    except PausedError as paused:
        say(str(paused))
    finally:
        copy_results(options.head, options.out)
    say("done")


def run_training(config: TrainConfig, options: argparse.Namespace) -> None:
    """Begin or resume the training, and print its figures."""
    say(config.command)
    figures = train(config, resume=options.head.exists(), pause=options.until - time.time(), watch=watch())
    say(", ".join(f"{kind} steps {ms:.1f} ms" for kind, ms in figures["step_ms"].items()))
    held_out = figures["held_out"]
    accepted = " ".join(f"{value:.3f}" for value in held_out["accepted"])
    say(f"{held_out['texts']} texts held out: mass kept {held_out['mass_kept']:.3f}, accepted {accepted}")
    if config.counts:
        print(table(figures["tokens_per_pass"]), flush=True)


def count_if_time(model: Path, options: argparse.Namespace) -> None:
    """Count tokens per target pass if there is time left for it."""
    left = min(options.until - time.time(), LONGEST_COUNT)
    if left > SHORTEST_COUNT:
        say("counting tokens per target pass")
        count(model, options.head, options.device, left)
    else:
        say("no time left for the counts: give the command again")


if __name__ == "__main__":
    main()
