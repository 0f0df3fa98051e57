"""Which families run packed, and that each of them gives the logits of a plain forward: docs/batching.md lists them."""

from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftproof.models.hf import HFModel
from draftproof.models.probe import probe

PACKED = """
llama mistral mixtral ministral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe starcoder2
olmo olmo2 olmo3 olmoe granite granitemoe cohere cohere2 deepseek_v2 deepseek_v3 glm glm4 glm4_moe gpt2 gpt_neox
gpt_bigcode opt nemotron helium smollm3 persimmon gpt_oss llama4_text exaone4 ernie4_5 hunyuan_v1_dense arcee
apertus seed_oss bitnet jetmoe diffllama dots1 minimax_m2 vaultgemma flex_olmo hunyuan_v1_moe
""".split()  # noqa: SIM905

RECTANGULAR = ["stablelm", "gptj", "codegen", "bloom", "falcon", "xglm", "biogpt"]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
"""transformers' GPTBigCode compiles functions so when it is imported."""

COMMON = ("llama", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gpt2", "qwen3_moe", "falcon")
"""Families in the default tests; the others are marked slow."""

WINDOWED = """
mistral mixtral ministral gemma2 gemma3_text phi3 phimoe starcoder2 olmo3 cohere2 gpt_oss exaone4 vaultgemma
""".split()  # noqa: SIM905

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 4}
OWN: dict[str, dict[str, Any]] = {
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {**SIZES, "d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
    "bloom": {"vocab_size": 61, "hidden_size": 32, "n_head": 4, "n_layer": 2},
    "falcon": {name: size for name, size in SIZES.items() if name != "head_dim"},
    "llama4_text": {**SIZES, "attention_chunk_size": 8},
    **{key: {**GPT, "bos_token_id": 0, "eos_token_id": 0} for key in ("gpt2", "gptj", "codegen", "gpt_bigcode")},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4},
    ),
}


def tiny(name: str) -> tf.PreTrainedModel:
    sizes = OWN.get(name, SIZES) | ({"sliding_window": 6} if name in WINDOWED else {}) | {"initializer_range": 0.3}
    config = CONFIG_MAPPING[name](**sizes)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def marked(names: list[str]) -> list[Any]:
    return [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(PACKED))
def test_a_family_that_uses_the_attention_interface_is_packed_and_agrees_with_a_plain_forward(name):
    if name not in CONFIG_MAPPING:
        pytest.skip("not in this transformers")
    model = tiny(name)
    served = HFModel(model, probed=True)
    assert served.packing_refusal is None
    probe(served, model, served._windows)


@pytest.mark.parametrize("name", marked(RECTANGULAR))
def test_a_family_with_its_own_attention_is_rectangular_and_says_why(name):
    served = HFModel(tiny(name), probed=True)
    assert served.packing_refusal is not None
    assert "brings its own attention" in served.packing_refusal
