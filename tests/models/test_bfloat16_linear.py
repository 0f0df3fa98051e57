"""Packed bfloat16 layers: float32 results close to the exact ones, used only on CPUs that multiply bfloat16."""

import copy

import pytest
import torch
from torch import nn

from draftproof.models.cpu_linear import BFloat16Linear, bfloat16_packable, pack_bfloat16
from draftproof.models.head import attach
from draftproof.models.head.network import FittedHead
from engine.tiny import llama
from engine.tiny_heads import IDS, on_target, trained

supported = pytest.mark.skipif(not bfloat16_packable(nn.Linear(2, 2)), reason="this CPU does not multiply bfloat16")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@supported
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_bfloat16_layer_gives_nearly_the_same(rows):
    weight, x = numbers(50, 64), numbers(rows, 2, 64)
    made = BFloat16Linear(weight)(x)
    assert made.dtype == torch.float32
    exact = x @ weight.T
    assert float((made - exact).abs().max()) < 0.02 * float(exact.abs().max())


@supported
def test_every_layer_is_replaced_and_a_bias_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 2, bias=False)))
    pack_bfloat16(model)
    assert [type(module) for module in model.modules() if not list(module.children())] == [BFloat16Linear] * 2
    assert copy.deepcopy(model)[0] is model[0]
    with pytest.raises(ValueError, match="has a bias"):
        pack_bfloat16(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("bfloat16", [True, False])
def test_a_head_gives_nearly_the_same_logits_packed_either_way(bfloat16, monkeypatch):
    if bfloat16 and not bfloat16_packable(nn.Linear(2, 2)):
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr(attach, "bfloat16_packable", lambda model: bfloat16)
    made = FittedHead.on(trained(), torch.tensor(IDS), llama())
    h = numbers(5, 16)
    plain = trained().out(h) @ llama().lm_head.weight[list(IDS)].detach().T
    near = 0.03 if bfloat16 else 1e-5
    assert float((made.logits(h) - plain).abs().max()) < near * float(plain.abs().max())
    assert isinstance(trained().fc, nn.Linear), "the head that was passed in stays as it is"


def test_the_most_frequent_tokens_are_kept():
    assert on_target(3).vocab.ids.tolist() == list(IDS[:3])
    assert on_target(3).logits(numbers(2, 16)).shape == (2, 3)
