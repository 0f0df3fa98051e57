"""Tiny random targets whose checkpoints hold an MTP layer, as DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5 have it.

transformers neither writes nor loads such a layer, so its tensors are added to the file: those of the target's last
layer with other weights, and what an MTP layer has besides. All weights follow from the tensors' names.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from models.numbered_weights import numbered

LAYERS, HIDDEN, V = 4, 16, 24
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
DEEPSEEK = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v3": (
        tf.DeepseekV3Config,
        tf.DeepseekV3ForCausalLM,
        {**EXPERTS, **DEEPSEEK, **MLA, "num_key_value_heads": 4},
    ),
    "glm4_moe": (tf.Glm4MoeConfig, tf.Glm4MoeForCausalLM, {**EXPERTS, **DEEPSEEK, **GROUPED, "use_qk_norm": True}),
    "qwen3_next": (
        tf.Qwen3NextConfig,
        tf.Qwen3NextForCausalLM,
        {**EXPERTS, **GROUPED, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 8},
    ),
    "qwen3_5_text": (tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM, {**GROUPED, **LINEAR}),
}
AROUND = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "eh_proj": (HIDDEN, 2 * HIDDEN), "shared_head.norm": (HIDDEN,)}
QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


def write(folder: Path, family: str) -> tf.PreTrainedModel:
    """Write a target with an MTP layer, and return the target as transformers loads it."""
    kind, model_class, sizes = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(kind(**SIZES, **sizes)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: numbered(name, weight.shape).to(weight.dtype) for name, weight in tensors.items()}
    last = f"model.layers.{LAYERS - 1}."
    qwen = family.startswith("qwen")
    start = "mtp.layers.0." if qwen else f"model.layers.{LAYERS}."
    for name in [name for name in tensors if name.startswith(last)]:
        new = start + name.removeprefix(last)
        tensors[new] = numbered(new, tensors[name].shape).to(tensors[name].dtype)
    for name, shape in AROUND.items():
        new = f"{QWEN_NAMES[name] if qwen else start + name}.weight"
        tensors[new] = numbered(new, shape)
    if not qwen:  # published checkpoints hold these copies as well
        tensors[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{start}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model_class.from_pretrained(folder).eval()


def edit(folder: Path, change: Any) -> None:
    """Apply a change to the tensors of a written checkpoint."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def with_mtp_settings(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Add what transformers' `MtpModel` wants to know: settings that Qwen's configurations lack, and names of tensors.

    It finds those of DeepSeek and GLM only in models of the published numbers of layers.
    """
    model.config.num_mtp_layers = 1
    if not model.config.model_type.startswith("qwen"):
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\..*"]
    if getattr(model.config, "layer_types", None) is not None:
        model.config.mtp_layer_types = ["full_attention"]
    return model
