"""Angles by table are those that the embedding computes, and embeddings whose angles change have no table."""

import pytest
import torch
import transformers as tf
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.models import rotary_table
from draftproof.models.rotary_table import RotaryTable

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 5000}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1250},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 625,
    },
}
GROWING = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 1250,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


def embedding(rope, **more):
    return LlamaRotaryEmbedding(tf.LlamaConfig(**SIZES, **more, rope_parameters={"rope_theta": 10000.0, **rope}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_the_angles_are_the_embeddings(rope, dtype):
    module, like = embedding(rope), torch.empty((1, 1, 1), dtype=dtype)
    table = RotaryTable.of(module, 5000, like)
    positions = torch.randint(5000, (1, 40))
    for made, wanted in zip(table(like, position_ids=positions), module(like, positions), strict=True):
        assert made.dtype == dtype
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("rope", GROWING.values(), ids=GROWING)
def test_angles_that_depend_on_other_positions_have_no_table(rope):
    """Dynamic NTK changes beyond the positions that a model was trained for: here the table would reach beyond them."""
    module = embedding(rope)
    assert RotaryTable.of(module, 10000, torch.empty(1, 1, 1)) is None


def test_layers_of_several_kinds():
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(**SIZES, num_hidden_layers=2, layer_types=kinds, rope_parameters=ropes)
    module, like, positions = Gemma3RotaryEmbedding(config), torch.empty(1, 1, 1), torch.randint(5000, (1, 9))
    table = RotaryTable.of(module, 5000, like)
    for kind in kinds:
        for made, wanted in zip(table(like, positions, kind), module(like, positions, kind), strict=True):
            assert torch.equal(made, wanted)


def test_what_has_no_table(monkeypatch):
    module, like = embedding(ROPES["default"]), torch.empty(1, 1, 1)
    assert RotaryTable.of(module, None, like) is None  # no limit
    assert RotaryTable.of(torch.nn.Linear(3, 3), 100, like) is None
    hooked = embedding(ROPES["default"])
    hooked.register_forward_hook(lambda *given: None)
    assert RotaryTable.of(hooked, 5000, like) is None
    monkeypatch.setattr(rotary_table, "MOST_BYTES", 5000 * 32 * 4 - 1)
    assert RotaryTable.of(module, 5000, like) is None
    assert RotaryTable.of(module, 4999, like) is not None
