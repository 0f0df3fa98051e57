"""Tiny random models with recurrent layers: the families that are served, and those that are refused."""

from collections.abc import Callable
from functools import cache

import torch
import transformers as tf

V = 8
SMALL = {
    "hidden_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 128,
}
QWEN = {**HEADS, **DELTA, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "max_position_embeddings": 512}
ONE_ATTENDS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "head_dim": 8}
ZAMBA = {"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1}

Config = Callable[[], tf.PreTrainedConfig]

SERVED: dict[str, Callable[[int], tf.PreTrainedConfig]] = {
    "lfm2": lambda n: tf.Lfm2Config(vocab_size=n, **HEADS, **CONV),
    "qwen3_5_text": lambda n: tf.Qwen3_5TextConfig(vocab_size=n, **QWEN),
    "falcon_h1": lambda n: tf.FalconH1Config(
        vocab_size=n, **HEADS, **{**MAMBA, "mamba_n_heads": 4}, mamba_d_ssm=32, head_dim=8, num_hidden_layers=2
    ),
    "qwen3_5_moe_text": lambda n: tf.Qwen3_5MoeTextConfig(vocab_size=n, **QWEN, **SHARED),
    "qwen3_next": lambda n: tf.Qwen3NextConfig(vocab_size=n, **QWEN, **SHARED),
    "lfm2_moe": lambda n: tf.Lfm2MoeConfig(vocab_size=n, **HEADS, **CONV, **EXPERTS, num_dense_layers=1),
    "granitemoehybrid": lambda n: tf.GraniteMoeHybridConfig(
        vocab_size=n,
        **HEADS,
        **MAMBA,
        **ONE_ATTENDS,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "nemotron_h": lambda n: tf.NemotronHConfig(
        vocab_size=n,
        **HEADS,
        **NEMOTRON,
        layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
    ),
    "bamba": lambda n: tf.BambaConfig(vocab_size=n, **HEADS, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "zamba2": lambda n: tf.Zamba2Config(
        vocab_size=n, **HEADS, **ZAMBA, num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"]
    ),
    "olmo_hybrid": lambda n: tf.OlmoHybridConfig(vocab_size=n, **HEADS, **DELTA),
    "mamba2": lambda n: tf.Mamba2Config(
        vocab_size=n, **SMALL, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
    ),
}
QUICK = ("lfm2", "qwen3_5_text", "falcon_h1")
"""Short convolutions, the delta rule, and Mamba-2 beside attention in one layer: in the default suite."""

IGNORES_STATE: dict[str, Config] = {
    "mamba": lambda: tf.MambaConfig(vocab_size=V, **SMALL, num_hidden_layers=2, state_size=8),
    "falcon_mamba": lambda: tf.FalconMambaConfig(vocab_size=V, **SMALL, num_hidden_layers=2, state_size=8),
    "jamba": lambda: tf.JambaConfig(
        vocab_size=V, **HEADS, num_hidden_layers=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1
    ),
}


@cache
def hybrid(name: str, vocab_size: int = V, spread: float | None = None) -> tf.PreTrainedModel:
    """Build a model of this family; `spread` is the standard deviation of its logits. Always the same weights."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(SERVED[name](vocab_size)).eval()
        if spread is not None:
            logits = model(torch.randint(vocab_size, (100, 8)), use_cache=False).logits
            model.get_output_embeddings().weight *= spread / logits.std()
    return model
