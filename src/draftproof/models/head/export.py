"""Export a head of `draftproof train` as an EAGLE-3 checkpoint of the package `speculators`, which vLLM serves.

It then consists of config.json and model.safetensors. The target's output rows of the draft vocabulary are written with
it; embeddings are not, because every reader of the format takes those of the target.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from draftproof.models.compatibility import decoder_config, head_size, max_positions
from draftproof.models.head import file as headfile
from draftproof.models.head.checkpoint import CONFIG, WEIGHTS
from draftproof.models.head.eagle3_file import TAPS
from draftproof.models.head.network import Head
from draftproof.models.head.taps import output_rows

VERSION: Final = "0.9.0"
"""The version of the package whose format is written."""

RENAMED: Final = {
    "embedding_norm": "layers.0.input_layernorm",
    "state_norm": "layers.0.hidden_norm",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "attended": "layers.0.self_attn.o_proj",
    "down": "layers.0.mlp.down_proj",
    "fc": "fc",
    "norm": "norm",
}
"""Names of a head's modules, and of the same modules in the format."""


def exportable_taps(layers: int) -> tuple[int, ...]:
    """Return taps that can be exported: those that vLLM takes if none are named, all before the last layer."""
    if layers < 2:
        raise ValueError(f"a target of {layers} layer has no states before its last layer, so no head can be exported")
    return tuple(sorted({min(max(1, tap), layers - 1) for tap in (2, layers // 2, layers - 3)}))


def export(folder: str | Path, out: str | Path, model: PreTrainedModel) -> None:
    """Write the head in `folder`, trained on `model`, to the folder `out` in the format of speculators."""
    head, meta = headfile.load(folder)
    headfile.check_target(meta, model)
    check_exportable(head, meta, str(folder))
    if Path(out).is_file():
        raise ValueError(f"{out} is a file, and a head is exported to a folder: give another name")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"{out} exists and is not empty: give another folder")
    Path(out).mkdir(parents=True, exist_ok=True)
    save_file(_tensors(head, meta, model), Path(out) / WEIGHTS)
    text = json.dumps(_config(head, meta, model), indent=2, sort_keys=True) + "\n"
    (Path(out) / CONFIG).write_text(text, encoding="utf-8")


def check_exportable(head: Head, meta: headfile.HeadMeta, source: str) -> None:
    """Refuse a head that reads the states after the target's last layer.

    They are normed here. vLLM passes them on as they are before that norm, which no norm of the head could make up for.
    """
    if meta.layers in head.shape.taps:
        raise ValueError(
            f"{source} reads the target's states after layers {head.shape.taps}; those after the last one, "
            f"{meta.layers}, are normed here and not in vLLM. Train a head that can be exported: "
            "draftproof train --export speculators"
        )


def _tensors(head: Head, meta: headfile.HeadMeta, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the head's tensors as they are stored, in float16, and the output rows in the target's own precision."""
    shape = head.shape
    tensors: dict[str, Tensor] = {f"{new}.weight": head.get_parameter(f"{old}.weight") for old, new in RENAMED.items()}
    for index in range(len(shape.taps)):
        tensors[f"fc_norm.{index}.weight"] = head.get_parameter(f"tap_norms.{index}.weight")
    sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    for name, part in zip("qkv", head.qkv.weight.split(sizes), strict=True):
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = part
    for name, part in zip(("gate", "up"), head.gate_up.weight.chunk(2), strict=True):
        tensors[f"layers.0.mlp.{name}_proj.weight"] = part
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    ids = torch.tensor(sorted(meta.ids))  # readers take the rows in the order of the tokens
    tensors["lm_head.weight"] = output_rows(model, ids)
    if len(ids) < meta.vocab_size:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(meta.vocab_size), ids)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _config(head: Head, meta: headfile.HeadMeta, model: PreTrainedModel) -> dict[str, Any]:
    """Return the configuration. Every option is written out: readers have different defaults."""
    shape = head.shape
    layer = LlamaConfig(
        vocab_size=head_size(model),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.eps,
        max_position_embeddings=max_positions(decoder_config(model)) or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
    )
    verifier = {"name_or_path": meta.target, "architectures": [type(model).__name__]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layer.to_diff_dict() | {"model_type": "llama"},
        "draft_vocab_size": len(meta.ids),
        TAPS: list(shape.taps),
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
