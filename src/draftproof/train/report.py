"""Report the figures of a training run: versions and step times, a table of tokens per pass, and a plot."""

import itertools
import math
import operator
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import draftproof
from draftproof.train.evaluate import DRAFT_TOKENS, OVERALL

Figures = dict[str, Any]
"""The contents of figures.json."""

HELPFUL_TOKENS_PER_PASS: Final = 1.3
"""Tokens per target pass below which drafting costs as much as it saves: with the shipped head on a CPU, a round with a
draft of 4 tokens takes 1.25 to 1.32 plain passes (docs/figures.md: 2.20 tokens per pass are 1.76 times as fast)."""

LONGER: Final = 4
"""Factor by which to train longer a head that does not help yet; less would hardly change its acceptance."""

USUAL_MINUTES: Final = 30.0
"""Default of --minutes, which is also the least to recommend."""

COLOURS = ("#2b5fd9", "#0b7a5b", "#d9771a")


def versions() -> dict[str, str]:
    """Return the software versions and the device that a result depends on."""
    return {
        "draftproof": draftproof.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def step_ms(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median milliseconds of a step: while one token of a draft was trained, and while all were."""
    times: dict[str, list[float]] = {}
    for entry in history:
        times.setdefault("single" if len(entry["accepted"]) == 1 else "unrolled", []).append(entry["step_ms"])
    return {kind: statistics.median(ms) for kind, ms in times.items()}


def verdict(figures: Figures, minutes: float) -> dict[str, Any]:
    """Judge whether a head saves time, from its best tokens per pass over the samplings, and advise what to do.

    If they were not counted, they are estimated from the acceptance on held-out texts, at temperature 1.
    """
    columns = figures.get("tokens_per_pass", {}).values()
    overall = [column[OVERALL] for column in columns if OVERALL in column]
    best = max(overall) if overall else _estimated_tokens_per_pass(figures["held_out"]["accepted"][:DRAFT_TOKENS])
    return {
        "tokens_per_pass": best,
        "counted": bool(overall),
        "helps": best >= HELPFUL_TOKENS_PER_PASS,
        "advice": "" if best >= HELPFUL_TOKENS_PER_PASS else _advice(best, bool(overall), minutes),
    }


def _advice(best: float, counted: bool, minutes: float) -> str:
    figure = f"{best:.2f} tokens per pass at best{'' if counted else ' (estimated)'}"
    return (
        f"This head does not help yet: {figure}, where plain decoding has 1 and drafting pays off from about "
        f"{HELPFUL_TOKENS_PER_PASS}. Train it longer: the same command with --resume --minutes "
        f"{max(USUAL_MINUTES, LONGER * minutes):g}"
    )


def _estimated_tokens_per_pass(accepted: Sequence[float]) -> float:
    """Return 1 + the expected accepted tokens of a draft whose tokens are accepted with these probabilities in turn."""
    return 1 + math.fsum(itertools.accumulate(accepted, operator.mul))


def summary(figures: Figures) -> str:
    """Format the tokens per pass as a table, if they were counted, and add the advice for a head that does not help."""
    counted = [table(figures["tokens_per_pass"])] if "tokens_per_pass" in figures else []
    return "\n".join([*counted, *filter(None, [figures["verdict"]["advice"]])])


def table(per_pass: Mapping[str, Mapping[str, float]]) -> str:
    """Format tokens per target pass as text: one row per kind of prompt, one column per sampling."""
    kinds = list(dict.fromkeys(kind for column in per_pass.values() for kind in column))
    width = max([len(kind) for kind in kinds] + [len("kind")])
    lines = ["  ".join([f"{'kind':<{width}}", *per_pass])]
    for kind in kinds:
        cells = [_cell(column.get(kind), len(name)) for name, column in per_pass.items()]
        lines.append("  ".join([f"{kind:<{width}}", *cells]))
    return "\n".join(lines)


def _cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.2f}"


def plot(figures: Figures, path: Path) -> bool:
    """Plot acceptance over training steps, and tokens per pass by kind if they were counted.

    Returns False if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    per_pass = figures.get("tokens_per_pass", {})
    panels = 2 if per_pass else 1
    figure = Figure(figsize=(5.5 * panels, 4.2), layout="constrained")
    acceptance, *counts = figure.subplots(1, panels, squeeze=False)[0]
    for step in range(figures["plan"]["depth"]):
        points = [(h["steps"], h["accepted"][step]) for h in figures["history"] if len(h["accepted"]) > step]
        if points:
            acceptance.plot(*zip(*points, strict=True), label=f"token {step + 1}", linewidth=1)
    acceptance.set(xlabel="step", ylabel="acceptance at temperature 1, given the true text")
    acceptance.legend(frameon=False, fontsize="small")
    for axes in counts:
        _bars(axes, per_pass)
    for axes in (acceptance, *counts):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def _bars(axes: Any, per_pass: Mapping[str, Mapping[str, float]]) -> None:
    kinds = list(dict.fromkeys(kind for column in per_pass.values() for kind in column))
    width = 0.8 / max(1, len(per_pass))
    for n, (name, column) in enumerate(per_pass.items()):
        xs = [i - 0.4 + (n + 0.5) * width for i, kind in enumerate(kinds) if kind in column]
        axes.bar(
            xs, [column[k] for k in kinds if k in column], width * 0.92, label=name, color=COLOURS[n % len(COLOURS)]
        )
    axes.axhline(1, color="#1d2129", linewidth=1)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set_ylabel("tokens per target pass")
    axes.legend(frameon=False, fontsize="small")
