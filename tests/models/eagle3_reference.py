"""Compute what the package `speculators` (0.9.0, `make test-references`) computes for EAGLE-3 heads.

PYTHONPATH=tests python -m models.eagle3_reference FOLDER writes FOLDER/NAME/ for each variant, as the package saves a
model, and its logits at steps 1 to 4 to FOLDER/NAME/expected.safetensors. With `exported` as second argument it reads
FOLDER as a checkpoint instead, and writes its logits there.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from models.numbered_weights import DRAFTED, LENGTH, STEPS, VOCABULARY, numbered, states, tokens

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
ALL = {"norm_before_residual": True, "norm_output": True, "fc_norm": True}
VARIANTS: dict[str, tuple[type, dict, dict]] = {
    "plain": (LlamaConfig, {}, {}),
    "full vocabulary": (LlamaConfig, {}, {"draft_vocab_size": VOCABULARY}),
    "fc_norm": (LlamaConfig, {}, {"fc_norm": True}),
    "norm_before_fc": (LlamaConfig, {}, {"norm_before_fc": True}),
    "norm_before_residual": (LlamaConfig, {}, {"norm_before_residual": True}),
    "norm_output": (LlamaConfig, {}, {"norm_output": True}),
    "qwen3": (Qwen3Config, {}, {}),
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {}),
    "two layers": (LlamaConfig, {"num_hidden_layers": 2}, {}),
    "llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3}, {}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}, {}),
    "two taps": (LlamaConfig, {}, {"eagle_aux_hidden_state_layer_ids": [1, 4]}),
    "everything": (Qwen3Config, {"num_hidden_layers": 2, "attention_bias": True, "rope_parameters": LLAMA3}, ALL),
}


def config(kind: type, sizes: dict, flags: dict) -> Eagle3SpeculatorConfig:
    layer = kind(**{**SIZES, **sizes}, attn_implementation="eager")
    settings = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    options = {"draft_vocab_size": len(DRAFTED), "eagle_aux_hidden_state_layer_ids": [2, 3, 5], **flags}
    return Eagle3SpeculatorConfig(transformer_layer_config=layer, speculators_config=settings, **options)


def logits(model: Eagle3DraftModel) -> torch.Tensor:
    """Return the logits of each step, [STEPS, LENGTH, R]; a step that is not read further than the text is padding."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    text = tokens()[:, 1 : 1 + LENGTH]
    with torch.no_grad():
        model(states(model.fc.in_features), text, torch.zeros_like(text), ttt_steps=STEPS)
    hook.remove()
    return torch.stack(found)


def main(folder: Path) -> None:
    for name, parts in VARIANTS.items():
        model = Eagle3DraftModel(config(*parts)).eval()
        with torch.no_grad():
            for key, value in model.state_dict().items():
                value.copy_(numbered(key, value.shape))
        model.save_pretrained(folder / name)
        save_file({"logits": logits(model).contiguous()}, folder / name / "expected.safetensors")


def read_exported(folder: Path) -> None:
    settings = Eagle3SpeculatorConfig.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"
    # Not by `from_pretrained`: with transformers 5.22.2 its model has these weights, and other logits each time.
    model = Eagle3DraftModel(settings).eval()
    unset, unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unknown
    assert all(name.startswith(("embed_tokens", "verifier_")) for name in unset)
    model.load_verifier_weights()
    save_file({"logits": logits(model).contiguous()}, folder / "expected.safetensors")


(read_exported if sys.argv[2:] == ["exported"] else main)(Path(sys.argv[1]))
