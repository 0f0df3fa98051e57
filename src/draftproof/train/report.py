"""The figures of a training: a sheet to keep, a table to read, a picture to look at."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof

Figures = dict[str, Any]
"""As they are written to figures.json."""

INKS = ("#2b5fd9", "#0b7a5b", "#d9771a")


def versions() -> dict[str, str]:
    return {
        "draftproof": draftproof.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def step_ms(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a step, the median, while it trained one token of a draft and while it trained all."""
    times: dict[str, list[float]] = {}
    for look in history:
        times.setdefault("single" if len(look["accepted"]) == 1 else "unrolled", []).append(look["step_ms"])
    return {kind: statistics.median(took) for kind, took in times.items()}


def table(per_pass: Mapping[str, Mapping[str, float]]) -> str:
    """Tokens for each pass of the target: a row a kind of prompt, a column a sampling."""
    kinds = list(dict.fromkeys(kind for column in per_pass.values() for kind in column))
    wide = max([len(kind) for kind in kinds] + [len("kind")])
    lines = ["  ".join([f"{'kind':<{wide}}", *per_pass])]
    for kind in kinds:
        cells = [_cell(column.get(kind), len(name)) for name, column in per_pass.items()]
        lines.append("  ".join([f"{kind:<{wide}}", *cells]))
    return "\n".join(lines)


def _cell(value: float | None, wide: int) -> str:
    return " " * wide if value is None else f"{value:{wide}.2f}"


def plot(figures: Figures, path: Path) -> bool:
    """Acceptance as it was learnt, and if they were counted tokens for each pass by kind. False where matplotlib is
    missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    per_pass = figures.get("tokens_per_pass", {})
    panels = 2 if per_pass else 1
    figure = Figure(figsize=(5.5 * panels, 4.2), layout="constrained")
    learnt, *fared = figure.subplots(1, panels, squeeze=False)[0]
    for step in range(figures["plan"]["depth"]):
        points = [(h["steps"], h["accepted"][step]) for h in figures["history"] if len(h["accepted"]) > step]
        if points:
            learnt.plot(*zip(*points, strict=True), label=f"token {step + 1}", linewidth=1)
    learnt.set(xlabel="step", ylabel="acceptance at temperature 1, given the true text")
    learnt.legend(frameon=False, fontsize="small")
    for axes in fared:
        _bars(axes, per_pass)
    for axes in (learnt, *fared):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def _bars(axes: Any, per_pass: Mapping[str, Mapping[str, float]]) -> None:
    kinds = list(dict.fromkeys(kind for column in per_pass.values() for kind in column))
    width = 0.8 / max(1, len(per_pass))
    for n, (name, column) in enumerate(per_pass.items()):
        places = [i - 0.4 + (n + 0.5) * width for i, kind in enumerate(kinds) if kind in column]
        axes.bar(places, [column[k] for k in kinds if k in column], width * 0.92, label=name, color=INKS[n % len(INKS)])
    axes.axhline(1, color="#1d2129", linewidth=1)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set_ylabel("tokens for each pass of the target")
    axes.legend(frameon=False, fontsize="small")
