"""Save and load a head: a folder of weights (safetensors, float16) and a JSON that names the target and the training.

Embeddings and output rows belong to the target and are not stored: a head of the bundled model takes 10 MB.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import weights_hash
from draftproof.models.transformers_types import PreTrainedModel

__all__ = ["HeadMeta", "check_sizes", "check_target", "load", "meta_for", "other_weights", "save", "weights_hash"]

WEIGHTS: Final = "head.safetensors"
METADATA: Final = "head.json"
IDS: Final = "vocabulary"
"""The name of `HeadMeta.ids` among the tensors: 16 384 numbers would make the JSON unreadable."""
LAYOUT: Final = 1
"""The version of the file format, raised whenever an older reader would misread a new file."""


@dataclass(frozen=True, slots=True)
class HeadMeta:
    """The metadata of a head.

    target      the target's name, for people
    model_type  its architecture, as transformers calls it
    hidden, layers, vocab_size  its sizes
    weights     `weights_hash` of the target
    ids         the target's tokens that the head can draft, most frequent first: every prefix is a draft vocabulary
    training    how it was trained and evaluated: any JSON
    licence     of the head, which is that of the target's weights, whose text it was trained on
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
    """Return the metadata of a head trained on this target."""
    config = decoder_config(model)
    sizes = int(config.hidden_size), int(config.num_hidden_layers), head_size(model)
    return HeadMeta(target, config.model_type, *sizes, weights_hash(model), tuple(ids), training, licence)


def save(path: str | Path, head: Head, meta: HeadMeta) -> None:
    """Write a head as a folder, overwriting an existing head."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().half().contiguous().cpu() for name, weight in head.state_dict().items()}
    weights[IDS] = torch.tensor(meta.ids, dtype=torch.int32)
    save_file(weights, folder / WEIGHTS)
    fields = {name: value for name, value in asdict(meta).items() if name != "ids"}
    metadata = {"layout": LAYOUT, **fields, "shape": asdict(head.shape)}
    (folder / METADATA).write_text(json.dumps(metadata, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: str | Path) -> tuple[Head, HeadMeta]:
    """Read a head, in float32 on the CPU and in eval mode, and its metadata."""
    metadata, shape = _read_metadata(path)
    try:
        head = Head(HeadShape(**shape | {"taps": tuple(shape["taps"])}), seed=None)
        weights = load_file(Path(path) / WEIGHTS)
        meta = HeadMeta(ids=tuple(weights.pop(IDS).tolist()), **metadata)
        head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} is no head that can be read: {error}") from error
    return head.eval().requires_grad_(False), meta


def load_metadata(path: str | Path) -> HeadMeta:
    """Read a head's metadata without its weights; `ids` is empty."""
    metadata, _ = _read_metadata(path)
    try:
        return HeadMeta(ids=(), **metadata)
    except TypeError as error:
        raise ValueError(f"{path} is no head that can be read: {error}") from error


def file_stamps(path: str | Path) -> tuple[tuple[int, int], ...]:
    """Return time and size of a head's files, which differ once it is trained anew."""
    found = [(Path(path) / name).stat() for name in (METADATA, WEIGHTS) if (Path(path) / name).is_file()]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in found)


def _read_metadata(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of the JSON, and the shape apart from them."""
    folder = Path(path)
    if not (folder / METADATA).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} is no head: expected a folder with {METADATA} and {WEIGHTS}, as `draftproof train` writes it"
        )
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        layout = metadata.pop("layout")
        if layout != LAYOUT:
            raise ValueError(f"{folder} has layout {layout}, and this version reads only layout {LAYOUT}")
        return metadata, metadata.pop("shape")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no head that can be read: {error}") from error


def check_sizes(meta: HeadMeta, model: PreTrainedModel) -> None:
    """Refuse a target of another architecture or size than the one the head was trained on."""
    config = decoder_config(model)
    compared = {
        "architecture": (meta.model_type, config.model_type),
        "hidden size": (meta.hidden, config.hidden_size),
        "number of layers": (meta.layers, config.num_hidden_layers),
        "vocabulary": (meta.vocab_size, head_size(model)),
    }
    for name, (expected, found) in compared.items():
        if expected != found:
            raise ValueError(
                f"this head was trained on {meta.target}, whose {name} is {expected}; that of the target is {found}. "
                "Use its own target, or train a head for this one: draftproof train"
            )


def check_target(meta: HeadMeta, model: PreTrainedModel) -> None:
    """Refuse every target but the one the head was trained on."""
    check_sizes(meta, model)
    other = other_weights(meta, model)
    if other is not None:
        raise ValueError(f"{other}. Train a head for it: draftproof train")


def other_weights(meta: HeadMeta, model: PreTrainedModel) -> str | None:
    """Say that a target has other weights than the one the head was trained on; None if it has the same."""
    found = weights_hash(model)
    if found == meta.weights:
        return None
    return (
        f"this head was trained on {meta.target}; the target has the same sizes and other weights "
        f"({found[:12]}…, not {meta.weights[:12]}…)"
    )
