"""Rectangular passes with our attention: scores that saturate (Gemma 2), and sinks (GPT-OSS)."""

import pytest
import torch
import transformers as tf

from draftproof.models import hf
from draftproof.models.attention import ATTENTION_NAME
from draftproof.models.hf import HFModel
from draftproof.models.weight_sharing import copy_for_slot_cache
from models.families import LLAMA, family

LAYERS = ["sliding_attention", "full_attention", "full_attention"]


def gpt_oss():
    torch.manual_seed(0)
    sizes = {**LLAMA, "head_dim": 8, "num_local_experts": 4, "sliding_window": 6, "layer_types": LAYERS}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = tf.GptOssConfig(**sizes, initializer_range=0.3, rope_parameters=rope)
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [lambda: family("gemma2"), gpt_oss], ids=["gemma2", "gpt-oss"])
@pytest.mark.parametrize("sizes", [(9, 3), (1, 11), (11, 1)])
@torch.no_grad()
def test_the_logits_are_the_models(make, sizes, monkeypatch):
    """As on a GPU, where the copy of a model looks our attention up by name; transformers' refuses these."""
    model = make()
    monkeypatch.setattr(hf, "copy_for_slot_cache", lambda model, packed=False: copy_for_slot_cache(model, packed=True))
    served = HFModel(model, probed=True)
    assert served._config._attn_implementation == ATTENTION_NAME
    tokens, cache, parts = torch.randint(61, (2, 12)), served.new_cache(2), []
    for part in tokens.split(sizes, 1):
        parts.append(served(part, cache).logits)
        cache.keep(torch.full((2,), part.shape[1]))
    wanted = model(tokens).logits
    assert (torch.cat(parts, 1) - wanted).abs().max() < 1e-5 * wanted.abs().max()
