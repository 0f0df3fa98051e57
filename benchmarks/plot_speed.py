"""Plot the measured speed on a CPU, against plain decoding and against transformers, into docs/speed.png.

    python benchmarks/plot_speed.py [--out docs/speed.png]

Nothing is measured here: the numbers are those of benchmarks/results/head.json and engine_cpu.json. Needs matplotlib.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

COLOURS = {
    "transformers": "#b0b0b0",
    "transformers prompt lookup": "#808080",
    "plain": "#d9c58b",
    "ngram": "#7fb3d5",
    "suffix": "#2e75b6",
    "head": "#1f6f43",
    "suffix+head": "#7dbb8a",
}
"""One colour per decoder, the same in both panels: grey for transformers, colours for draftproof."""

Cells = Mapping[str, Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "speed.png")
    options = parser.parse_args()
    head, drafters = (_read(name) for name in ("head", "engine_cpu"))
    temperatures = {"T=0": "greedy", "T=1": "temperature 1"}
    plot({name: head["clock"][key] for key, name in temperatures.items()}, drafters["kinds"], options.out)


def _read(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


def plot(head: Mapping[str, Cells], kinds: Mapping[str, Cells], path: Path) -> None:
    """Draw the trained head in the left panel, and the drafters that copy from the text in the right one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.6], sharey=True)
    _bars(left, head, ["transformers", "plain", "head", "suffix+head"])
    _bars(right, kinds, ["transformers", "transformers prompt lookup", "plain", "ngram", "suffix"])
    left.set_title("trained head (16 prompts; quartiles)")
    right.set_title("drafts copied from the text, greedy, by kind of prompt (lowest and highest prompt)")
    left.set_ylabel("speed relative to plain decoding")
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    ordered = [name for name in COLOURS if name in handles]
    figure.legend([handles[name] for name in ordered], ordered, loc="outside lower center", ncols=len(ordered))
    figure.suptitle("SmolLM2-135M-Instruct, float32, 2 CPU cores, one prompt at a time", fontsize=11)
    figure.savefig(path, dpi=110)


def _bars(axis: Any, groups: Mapping[str, Cells], decoders: Sequence[str]) -> None:
    """Draw a group of bars for each key, with the spread as error bars and the ratio on top."""
    width = 0.84 / len(decoders)
    for i, decoder in enumerate(decoders):
        places = [group + (i - (len(decoders) - 1) / 2) * width for group in range(len(groups))]
        cells = [cells[decoder] for cells in groups.values()]
        ratios = [cell["against_plain"] for cell in cells]
        spreads = [cell["quartiles"] if "quartiles" in cell else (cell["lowest"], cell["highest"]) for cell in cells]
        errors = [[r - low for r, (low, _) in zip(ratios, spreads, strict=True)]]
        errors += [[high - r for r, (_, high) in zip(ratios, spreads, strict=True)]]
        axis.bar(places, ratios, width, yerr=errors, label=decoder, color=COLOURS[decoder], ecolor="#555555")
        ink = "white" if decoder in ("head", "suffix") else "black"
        for place, ratio in zip(places, ratios, strict=True):
            axis.text(place, 0.06, f"{ratio:.2f}", rotation=90, ha="center", va="bottom", fontsize=8, color=ink)
    axis.set_xticks(range(len(groups)), [name.replace("-", " ") for name in groups])
    axis.axhline(1, color="black", linewidth=0.8, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
