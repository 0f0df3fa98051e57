"""The results of a benchmark as a file: every run, what was asked, and on which machine."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import draftproof
from draftproof.bench.measure import Run


@dataclass(frozen=True, slots=True)
class Results:
    settings: dict[str, Any]
    machine: dict[str, Any]
    runs: list[Run]

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"


def machine() -> dict[str, Any]:
    """What a speed depends on besides the program."""
    return {
        "draftproof": draftproof.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def read_results(path: Path) -> Results:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Results(kept["settings"], kept["machine"], [Run(**run) for run in kept["runs"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of `draftproof bench --json` ({type(error).__name__})") from None


def differences(one: Results, other: Results) -> Sequence[str]:
    """What besides speed is different, a line each: a comparison should know."""
    said = []
    for part in ("settings", "machine"):
        a, b = getattr(one, part), getattr(other, part)
        said += [f"{key}: {a.get(key)} → {b.get(key)}" for key in {**a, **b} if a.get(key) != b.get(key)]
    return said
