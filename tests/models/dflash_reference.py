"""Compute what the packages `dflash` and `speculators` compute for DFlash drafters.

PYTHONPATH=tests python -m models.dflash_reference FOLDER, with dflash 0.1.0 and speculators 0.9.0. For each variant it
writes FOLDER/NAME/, as the package saves a model, and the logits of blocks after texts of 1 to LENGTH states to
FOLDER/NAME/expected.safetensors: [LENGTH, BLOCK - 1, tokens].
"""

import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel as Original
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from models.numbered_weights import DRAFTED, LENGTH, VOCABULARY, numbered, states, tokens

BLOCK, MASK, TAPS, HIDDEN = 5, 22, (2, 3, 5), 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
OUTPUT = {"output_multiplier": 0.5, "final_logit_softcapping": 0.8, "input_embedding_scale": 3.0}
ORIGINAL = {
    "plain": ({}, {}),
    "window": (WINDOWS, {}),
    "not causal": ({**WINDOWS, "is_causal": False}, {}),
    "biases": ({"attention_bias": True}, {}),
    "yarn": ({"rope_parameters": YARN}, {}),
    "output": ({}, OUTPUT),
}


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(numbered(name, value.shape))


def block_after(n: int) -> torch.Tensor:
    """Return the tokens of a block after n states: the last token, then masks."""
    return torch.tensor([[int(tokens()[0, n]), *[MASK] * (BLOCK - 1)]])


def original(folder: Path, sizes: dict, options: dict) -> torch.Tensor:
    inner = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS], **options}
    config = Qwen3Config(**{**SIZES, **sizes}, block_size=BLOCK, num_target_layers=8, dflash_config=inner)
    model = Original(config).eval()
    fill(model)
    model.save_pretrained(folder)
    table, rows = (numbered(f"{name}.weight", (VOCABULARY, HIDDEN)) for name in ("embed_tokens", "lm_head"))
    logits = []
    for n in range(1, LENGTH + 1):
        embedded = table[block_after(n)] * options.get("input_embedding_scale", 1.0)
        given = states(len(TAPS) * HIDDEN)[:, :n]
        hidden = model(torch.arange(n + BLOCK)[None], noise_embedding=embedded, target_hidden=given)[0, 1:]
        logits.append(model.compute_logits(hidden, lambda h: h @ rows.T))
    return torch.stack(logits)


def speculators(folder: Path, draft_vocabulary: int) -> torch.Tensor:
    settings = SpeculatorsConfig(
        algorithm="dflash",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**SIZES),
        speculators_config=settings,
        draft_vocab_size=draft_vocabulary,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK,
    )
    model = DFlashDraftModel(config).eval()
    fill(model)
    model.save_pretrained(folder)
    table = numbered("embed_tokens.weight", (VOCABULARY, HIDDEN))
    logits = []
    for n in range(1, LENGTH + 1):
        x, text = table[block_after(n)], model.hidden_norm(model.fc(states(len(TAPS) * HIDDEN)[:, :n]))
        rotary = model.rotary_emb(x, torch.arange(n + BLOCK)[None])
        for layer in model.layers:
            x = layer(hidden_states=x, target_hidden=text, position_embeddings=rotary)
        logits.append(model.lm_head(model.norm(x))[0, 1:])
    return torch.stack(logits)


def main(folder: Path) -> None:
    with torch.no_grad():
        for name, parts in ORIGINAL.items():
            logits = original(folder / name, *parts)
            save_file({"logits": logits.contiguous()}, folder / name / "expected.safetensors")
        for name, size in (("speculators", len(DRAFTED)), ("speculators, full vocabulary", VOCABULARY)):
            logits = speculators(folder / name, size)
            save_file({"logits": logits.contiguous()}, folder / name / "expected.safetensors")


main(Path(sys.argv[1]))
