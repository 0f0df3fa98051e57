"""Train the head that is shipped, on a machine with a GPU and no network: the model's file travels in two halves.

    split -n 2 SmolLM2-135M-Instruct.Q4_1.gguf build/model/part-        # here: halves under build/, which git ignores
    PYTHONPATH=src python3 benchmarks/train_on_gpu.py --depth 4 --out DIR --until $(($(date +%s) + 585))
    PYTHONPATH=src python3 benchmarks/train_on_gpu.py --depth 4 --out DIR --until $(($(date +%s) + 345)) \\
        --start build/start --seed 1 --vocab 16384 --no-counts          # go on from the head in build/start

Joins the halves, converts them, trains (`draftproof train`), counts tokens for each pass (benchmarks/head.py), and
copies head, figures and counts to DIR: the head as soon as it has been trained. A command that ends early, or is ended,
goes on when it is given again. Counts are the same on any machine, and may as well be made on another (--no-counts).
--profile 10 first tells where the time of a step goes (benchmarks/train_steps.py), in half a minute.
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
from draftproof.train.config import PausedError, Plan, Workplace
from draftproof.train.report import table
from draftproof.train.trainer import Progress

START = time.monotonic()
STARTING_SECONDS = 20.0
SHORTEST_COUNT, LONGEST_COUNT = 45.0, 160.0
LEAVING_SECONDS = 8.0
"""For the last step, the picture and the copies, behind the time that a training was given."""

UNLIMITED_MINUTES = 10.5

TOLD = ("head.safetensors", "head.json", "figures.json", "acceptance.png", "passes.json")
SAY_SECONDS = 10.0
PROFILE_SECONDS = 60.0


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {line}", flush=True)


def target(halves: Path, folder: Path) -> Path:
    """The bundled model as a folder that transformers reads, made of the halves of its file."""
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


def planned(options: argparse.Namespace, model: Path) -> Plan:
    """With as many minutes as are asked for, or as there are until the command must be over."""
    plan = Plan(
        target=str(model), out=options.head, start=options.start, minutes=options.minutes or UNLIMITED_MINUTES,
        data=options.data, counts=not options.no_counts, vocab=options.vocab, depth=options.depth, seed=options.seed,
        length=options.length, learning_rate=options.learning_rate, device=options.device,
        name="SmolLM2-135M-Instruct", licence="Apache-2.0, as SmolLM2-135M-Instruct",
    )  # fmt: skip
    if options.minutes or options.until == math.inf:
        return plan
    left = options.until - time.time() - LEAVING_SECONDS - (LONGEST_COUNT if plan.counts else 0.0)
    spent = Workplace(options.head / "work", plan).spent
    return dataclasses.replace(plan, minutes=round((spent + left) / 60, 2))


def watch() -> Watch:
    told = {"": -SAY_SECONDS}

    def rarely(stage: str, line: str) -> None:
        if time.monotonic() - told.get(stage, -SAY_SECONDS) >= SAY_SECONDS:
            told[stage] = time.monotonic()
            say(line)

    def progress(now: Progress) -> None:
        accepted = " ".join(f"{value:.3f}" for value in now.accepted)
        took = f"{now.step_ms:.1f} ms a step"
        line = f"training {now.share:.0%}, step {now.steps}, {took}, loss {now.loss:.3f}, accepted {accepted}"
        rarely("training", line)

    return Watch(lambda stage, share: rarely(stage, f"{stage} {share:.0%}"), progress, say)


def count(model: Path, head: Path, device: str, seconds: float) -> None:
    """Tokens for each pass, by the benchmark itself: a process of its own, and seven cells."""
    options = ["--only-passes", "--device", device, "--target", str(model), "--head", str(head)]
    options += ["--seconds-a-cell", f"{(seconds - STARTING_SECONDS) / 7:.1f}", "--out", str(head / "passes.json")]
    torch.cuda.empty_cache()  # what this process no longer uses would be missing there
    _ended("head.py", options, seconds)


def profile(model: Path, options: argparse.Namespace) -> None:
    """Where a step's time goes: in a process of its own, whose memory is given back."""
    asked = ["--target", str(model), "--device", options.device, "--steps", str(options.profile), "--data"]
    asked += ["--depth", str(options.depth), "--length", str(options.length)]
    asked += ["--vocab", str(options.vocab)] if options.vocab else []
    _ended("train_steps.py", asked, PROFILE_SECONDS)


def _ended(program: str, options: list[str], seconds: float) -> None:
    """A program beside this one, for so many seconds at most."""
    try:
        subprocess.run([sys.executable, str(Path(__file__).with_name(program)), *options], check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        say(f"{program} was ended after {seconds:.0f} seconds")


def tell(head: Path, out: Path) -> None:
    """Copy what there is."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOLD:
        if (head / name).exists():
            shutil.copy(head / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("build/smollm2"), help="made of the halves if missing")
    parser.add_argument("--halves", type=Path, default=Path("build/model"))
    parser.add_argument("--head", type=Path, default=Path("build/head"))
    parser.add_argument("--start", type=Path, help="the folder of a head to go on from")
    parser.add_argument(
        "--minutes", type=float, help="for data, training and evaluation, all commands; default: what --until leaves"
    )
    parser.add_argument("--until", type=float, default=math.inf, help="this command must be over then, as date +%%s")
    parser.add_argument("--data", type=float, help="share of the minutes for texts")
    parser.add_argument("--no-counts", action="store_true", help="do not count tokens for each pass")
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
            learn(planned(options, model), options)
            tell(options.head, options.out)
        if not options.no_counts:
            counted(model, options)
    except PausedError as paused:
        say(str(paused))
    finally:
        tell(options.head, options.out)
    say("done")


def learn(plan: Plan, options: argparse.Namespace) -> None:
    """Begin or go on, and say what came of it."""
    say(plan.command)
    figures = train(plan, resume=options.head.exists(), pause=options.until - time.time(), watch=watch())
    say(", ".join(f"{kind} steps {ms:.1f} ms" for kind, ms in figures["step_ms"].items()))
    told = figures["held_out"]
    accepted = " ".join(f"{value:.3f}" for value in told["accepted"])
    say(f"{told['texts']} texts held out: mass kept {told['mass_kept']:.3f}, accepted {accepted}")
    if plan.counts:
        print(table(figures["tokens_per_pass"]), flush=True)


def counted(model: Path, options: argparse.Namespace) -> None:
    left = min(options.until - time.time(), LONGEST_COUNT)
    if left > SHORTEST_COUNT:
        say("counting tokens for each pass")
        count(model, options.head, options.device, left)
    else:
        say("no time left for the counts: give the command again")


if __name__ == "__main__":
    main()
