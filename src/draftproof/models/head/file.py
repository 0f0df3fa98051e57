"""A head on disk: a folder with its weights (safetensors, float16) and a JSON that names the target and the training.

Embeddings and output rows are the target's own and are not stored: a head of the bundled model is 10 MB.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import weights_hash

__all__ = ["HeadMeta", "check_target", "load", "meta_for", "save", "weights_hash"]

WEIGHTS: Final = "head.safetensors"
SHEET: Final = "head.json"
IDS: Final = "vocabulary"
LAYOUT: Final = 1
"""Raised whenever an older reader would misread what is written."""


@dataclass(frozen=True, slots=True)
class HeadMeta:
    """What is known of a head besides its weights.

    target      the target's name, for people
    model_type  its architecture, as transformers calls it
    hidden, layers, vocab_size  its sizes
    weights     `weights_hash` of the target
    ids         the target's tokens that the head can say, the most frequent first: the first so many are a vocabulary
    training    how it was made and how it fared: whatever the training wants to tell
    licence     of the head; that of the target's weights, whose text it was trained on
    """

    target: str
    model_type: str
    hidden: int
    layers: int
    vocab_size: int
    weights: str
    ids: tuple[int, ...]
    training: dict[str, Any] = field(default_factory=dict)
    licence: str = ""


def meta_for(
    model: PreTrainedModel, ids: tuple[int, ...], *, target: str, training: dict[str, Any], licence: str
) -> HeadMeta:
    """The sheet of a head that was trained on this target."""
    config = decoder_config(model)
    sizes = int(config.hidden_size), int(config.num_hidden_layers), head_size(model)
    return HeadMeta(target, config.model_type, *sizes, weights_hash(model), tuple(ids), training, licence)


def save(path: str | Path, head: Head, meta: HeadMeta) -> None:
    """Write a head as a folder; one that is there is written over."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().half().contiguous().cpu() for name, weight in head.state_dict().items()}
    weights[IDS] = torch.tensor(meta.ids, dtype=torch.int32)
    save_file(weights, folder / WEIGHTS)
    told = {name: value for name, value in asdict(meta).items() if name != "ids"}
    sheet = {"layout": LAYOUT, **told, "shape": asdict(head.shape)}
    (folder / SHEET).write_text(json.dumps(sheet, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: str | Path) -> tuple[Head, HeadMeta]:
    """A head in float32 on the CPU, in eval mode, and its sheet."""
    folder = Path(path)
    if not (folder / SHEET).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} is no head: a folder with {SHEET} and {WEIGHTS}, as `draftproof train` writes it")
    try:
        sheet = json.loads((folder / SHEET).read_text(encoding="utf-8"))
        if sheet.pop("layout") != LAYOUT:
            raise ValueError(f"{folder} has another layout than {LAYOUT}, which is all this version reads")
        shape = sheet.pop("shape")
        head = Head(HeadShape(**shape | {"taps": tuple(shape["taps"])}))
        weights = load_file(folder / WEIGHTS)
        meta = HeadMeta(ids=tuple(weights.pop(IDS).tolist()), **sheet)
        head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} is no head that can be read: {error}") from error
    return head.eval().requires_grad_(False), meta


def check_target(meta: HeadMeta, model: PreTrainedModel) -> None:
    """Refuse a target that the head was not trained on: it would guess badly, and nobody would know why."""
    config = decoder_config(model)
    its = {
        "architecture": (meta.model_type, config.model_type),
        "hidden size": (meta.hidden, config.hidden_size),
        "number of layers": (meta.layers, config.num_hidden_layers),
        "vocabulary": (meta.vocab_size, head_size(model)),
    }
    for what, (trained, given) in its.items():
        if trained != given:
            raise ValueError(
                f"this head was trained on {meta.target}, whose {what} is {trained}; that of the target is {given}. "
                "Use its own target, or train a head for this one: draftproof train"
            )
    if weights_hash(model) != meta.weights:
        raise ValueError(
            f"this head was trained on {meta.target}; the target has the same sizes and other weights "
            f"({weights_hash(model)[:12]}…, not {meta.weights[:12]}…). Train a head for it: draftproof train"
        )
