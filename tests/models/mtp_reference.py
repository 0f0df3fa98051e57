"""Compute what the package `speculators` computes for a Qwen MTP layer: PYTHONPATH=tests python -m models.mtp_reference
FOLDER, the checkpoint of a target. Writes the logits of step 1 to FOLDER/expected.safetensors.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.mtp.converter import MTPConverter
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

TOKENS = torch.tensor([[3, 17, 8, 21, 5, 11, 2, 9, 14, 20, 1]])


def main(folder: Path) -> None:
    layer = AutoConfig.from_pretrained(folder)
    layer._attn_implementation = "eager"
    settings = SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(folder), architectures=layer.architectures),
    )
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=settings))
    missing = model.load_state_dict(MTPConverter().convert_to_state_dict(str(folder)), strict=False).missing_keys
    assert all(name.split(".")[0] in ("embed_tokens", "lm_head", "verifier_lm_head") for name in missing), missing
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        model.embed_tokens.weight.copy_(weights["model.embed_tokens.weight"])
        model.lm_head.weight.copy_(weights["lm_head.weight"])
        size = layer.hidden_size
        states = torch.stack([torch.full((size,), 1.0).cumsum(0).add(3 * i).sin() for i in range(TOKENS.shape[1])])
        logits = model.eval()(TOKENS, states[None])[0][0][0]
    save_file({"logits": logits.contiguous()}, folder / "expected.safetensors")


main(Path(sys.argv[1]))
