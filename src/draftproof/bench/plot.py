"""Speedups by kind of prompt as a picture."""

from collections.abc import Sequence
from pathlib import Path

from draftproof.bench.measure import PLAIN, Run
from draftproof.bench.summary import Figures, kinds_of, summarise

INKS = ("#2b5fd9", "#0b7a5b", "#d9771a", "#6a3fb5", "#c02f3f", "#5d6573", "#0d8ca8", "#a8871a")


def plot(runs: Sequence[Run], path: Path) -> None:
    """A group of bars a kind, a bar a contestant, quartiles as whiskers; 1 is plain decoding."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'draftproof[bench]'") from None

    kinds = kinds_of(runs)
    groups = {kind: {f.contestant: f for f in summarise(runs, kind)} for kind in kinds}
    names = [f.contestant for f in summarise(runs) if f.contestant != PLAIN]
    figure = Figure(figsize=(max(6.0, 1.7 * len(kinds) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        found = [(i, groups[kind].get(name)) for i, kind in enumerate(kinds)]
        bars = [(i - 0.4 + (n + 0.5) * width, f) for i, f in found if f is not None and f.speedup is not None]
        _bars(axes, bars, width * 0.92, name, INKS[n % len(INKS)])
    axes.axhline(1, color="#1d2129", linewidth=1)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("speedup over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, dpi=150)


def _bars(axes: "object", bars: list[tuple[float, Figures]], width: float, name: str, ink: str) -> None:
    spreads = [figures.speedup for _, figures in bars if figures.speedup is not None]
    middle = [s.middle for s in spreads]
    whiskers = [[s.middle - s.low for s in spreads], [s.high - s.middle for s in spreads]]
    places = [x for x, _ in bars]
    axes.bar(places, middle, width, yerr=whiskers, label=name, color=ink, ecolor="#5d6573", capsize=2)  # type: ignore[attr-defined]
