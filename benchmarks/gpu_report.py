"""Print what `verify_gpu.py` has measured as a table, or plot it."""

from pathlib import Path
from typing import Any

BATCHES = (1, 8, 64, 256)
PLOTTED = ("temperature", "top-k 50, top-p 0.9", "top-p 0.95", "greedy")
Lines = list[dict[str, Any]]


def table(lines: Lines) -> str:
    """Return a line for each case: our times, then the bars they were to meet."""
    rows: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("dtype", "setting", "rule", "draft", "rows"))
        rows.setdefault(key, {})[line["B"]] = line
    text = [f"{'':76}" + "".join(f"{f'B={B}':>9}" for B in BATCHES) + "   bars; ratio to token"]
    for key, found in rows.items():
        times = "".join(f"{found[B]['time']:>9}" if B in found else f"{'':>9}" for B in BATCHES)
        bars = " ".join(str(found[B]["bar"]) for B in BATCHES if B in found and found[B]["bar"])
        plain = rows.get((key[0], key[1], "token", *key[3:]), {}) if key[2] != "token" else {}
        ratios = " ".join(f"{found[B]['time'] / plain[B]['time']:.2f}×" for B in BATCHES if B in found and B in plain)
        text.append(f"{', '.join(key):76}{times}   {bars}{ratios}")
        last = found[max(found)]
        text.append(f"{'':8}B={max(found)}: {last.get('stages', '')} floor {last['floor']}")
    return "\n".join(text)


STAGES = ("scan", "settle", "sift", "settle_deep")


def stages(lines: Lines) -> str:
    """Return a Markdown table of where the time of each call goes, beside the bytes it needs and the
    time to read them."""
    text = ["| logits, sampling, rule | B | µs | bar | MB | read once | scan | settle | sift | deep | verdict |"]
    text.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        parts = line["stages"]
        verdict = round(sum(time for name, time in parts.items() if name not in STAGES), 1)
        cells = [parts.get(name, "") for name in STAGES]
        name = f"{line['dtype']}, {line['setting']}, {line['rule']}"
        name += {"drawn, same sampling": "", "chosen": ", chosen draft"}.get(line["draft"], ", draft by temperature")
        name += "" if line["rows"] == "zipf" else ", flat rows"
        megabytes = round(line["floor"] * COPIED_A_MICROSECOND, 1)
        row = (name, line["B"], line["time"], line["bar"] or "", megabytes, line["floor"], *cells, verdict)
        text.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(text)


COPIED_A_MICROSECOND = 4.17
"""Megabytes per microsecond: the copy bandwidth of an H200 (KERNELS.md)."""

PEERS = {"FlashInfer": "C0", "SGLang": "C1", "torch": "C2", "vLLM v1": "C3", "vLLM v2": "C4", "vLLM v2 block": "C5"}
"""Colours of the peers, the same in all panels."""


def plot(lines: Lines, path: Path) -> None:
    """Plot time against batch size, with the time to read every logit once and the peers' times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PLOTTED), figsize=(4 * len(PLOTTED), 4.4), sharey=True, layout="constrained")
    for axis, setting in zip(axes, PLOTTED, strict=True):
        ours = [
            line for line in lines
            if (line["dtype"], line["setting"], line["rule"], line["rows"]) == ("float32", setting, "token", "zipf")
            and line["draft"] == "drawn, same sampling"
        ]  # fmt: skip
        _panel(axis, sorted(ours, key=lambda line: line["B"]))
        axis.set_title(setting)
        axis.set_xlabel("requests in the batch")
    axes[0].set_ylabel("µs from logits to verdict")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, ours: Lines) -> None:
    batches = [line["B"] for line in ours]
    for name in sorted({name for line in ours for name in line.get("peers", {})}):
        known = [(line["B"], line["peers"][name]) for line in ours if line["peers"].get(name) is not None]
        axis.plot(*zip(*known, strict=True), marker=".", linewidth=1, alpha=0.7, label=name, color=PEERS[name])
    axis.plot(batches, [line["time"] for line in ours], marker="o", linewidth=2, color="black", label="draftproof")
    axis.plot(batches, [line["floor"] for line in ours], linestyle=":", color="black", label="every logit read once")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(batches, [str(B) for B in batches])
    axis.grid(visible=True, which="major", alpha=0.25)
