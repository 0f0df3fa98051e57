"""Checkpoints that reference packages wrote, and the logits they computed: stored in tests/data without the weights.

A checkpoint is its config.json and the names and shapes of its tensors; `numbered_weights.numbered` gives the weights.
`PYTHONPATH=tests python -m models.reference_checkpoints FOLDER KIND` stores what KIND_reference.py wrote to FOLDER.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.numbered_weights import numbered

DATA = Path(__file__).parents[1] / "data"


def described(kind: str) -> dict[str, Any]:
    """Return config and tensor shapes of each variant."""
    found: dict[str, Any] = json.loads((DATA / f"{kind}.json").read_text())
    return found


def expected(kind: str, name: str) -> Tensor:
    """Return the reference's logits, [steps, positions, tokens]."""
    return load_file(DATA / f"{kind}.safetensors")[name]


def written(kind: str, name: str, folder: Path) -> Path:
    """Write the checkpoint of a variant to a folder and return it."""
    variant = described(kind)[name]
    save(folder, variant["config"], {key: numbered(key, shape) for key, shape in variant["tensors"].items()})
    return folder


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def describe(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `described` and `expected` return, of a folder with one checkpoint for each variant."""
    variants, logits = {}, {}
    for path in sorted(folder.iterdir()):
        with safe_open(path / "model.safetensors", "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        variants[path.name] = {"config": json.loads((path / "config.json").read_text()), "tensors": shapes}
        logits[path.name] = load_file(path / "expected.safetensors")["logits"]
    return variants, logits


if __name__ == "__main__":
    source, kind = Path(sys.argv[1]), sys.argv[2]
    stored, results = describe(source)
    lines = [f'  "{name}": {json.dumps(variant)}' for name, variant in stored.items()]
    (DATA / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    save_file(results, DATA / f"{kind}.safetensors")
