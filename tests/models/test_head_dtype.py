"""Heads in bfloat16, as on a GPU: states near those of float32, positions with all their bits, logits in float32."""

import copy

import pytest
import torch

from draftproof.core import device as core_device
from draftproof.models.fused_modules import FusedMLP
from draftproof.models.head import attach, attach_published
from draftproof.models.head.attach import dtype_on
from draftproof.models.head.attach_published import fitted_dflash, fitted_eagle3
from draftproof.models.head.network import FittedHead
from engine.tiny import llama
from engine.tiny_heads import IDS, trained
from models import reference_checkpoints as reference
from models.test_dflash import VARIANTS as DFLASH
from models.test_dflash import target as dflash_target
from models.test_eagle3 import LAYERS, VOCABULARY
from models.test_eagle3 import VARIANTS as EAGLE3
from models.tiny_targets import tiny_target

CLOSE = 0.1
"""Largest mean difference from float32, in standard deviations: a few roundings of eight bits in each layer."""


@pytest.fixture
def in_dtype(monkeypatch):
    """Return a function that sets what heads are attached in, without packing."""

    def use(dtype):
        for module in (attach, attach_published):
            monkeypatch.setattr(module, "dtype_on", lambda model: dtype)
        for packs in ("bfloat16_packable", "packable"):
            monkeypatch.setattr(attach, packs, lambda part: False)

    return use


def eagle3_logits(head, width, late):
    """Return the logits of a head after four tokens from a late position on."""
    generator = torch.Generator().manual_seed(0)
    taps = [torch.randn(1, 4, width, generator=generator).to(head.dtype) for _ in head.head.taps]
    tokens = torch.randint(len(head.table), (1, 4), generator=generator)
    positions = torch.arange(late, late + 4)[None]
    fused = head.head.fuse(taps)
    made = head.head.step(head.embedded(tokens), fused, positions, head.head.new_cache(1, late + 4), reach=late + 4)
    assert fused.dtype == made.dtype == head.dtype
    assert head.logits(made).dtype == torch.float32
    return head.logits(made)


def difference(one, other):
    return float((one - other).abs().mean() / other.std())


@pytest.mark.parametrize("name", EAGLE3)
@torch.no_grad()
def test_published_heads(name, in_dtype, tmp_path):
    folder, made = reference.written("eagle3", name, tmp_path), {}
    for dtype in (torch.float32, torch.bfloat16):
        in_dtype(dtype)
        width = reference.described("eagle3")[name]["config"].get("target_hidden_size")
        model = copy.deepcopy(tiny_target(VOCABULARY, width or hidden_of(name), LAYERS))
        head = fitted_eagle3(folder, model)
        assert head.head.rotary.frequencies.dtype == torch.float32
        made[dtype] = eagle3_logits(head, head.head.shape.target_hidden, late=200)
    assert 0 < difference(made[torch.bfloat16], made[torch.float32]) < CLOSE


def hidden_of(name):
    config = reference.described("eagle3")[name]["config"]
    return config.get("transformer_layer_config", config)["hidden_size"]


@pytest.mark.parametrize("name", DFLASH)
@torch.no_grad()
def test_blocks_of_dflash(name, in_dtype, tmp_path):
    folder, made = reference.written("dflash", name, tmp_path), {}
    for dtype in (torch.float32, torch.bfloat16):
        in_dtype(dtype)
        fitted = fitted_dflash(folder, dflash_target())
        network, generator = fitted.network, torch.Generator().manual_seed(0)
        taps = [torch.randn(1, 9, 16, generator=generator).to(dtype) for _ in network.shape.taps]
        cache = network.new_cache(1, 32)
        network.read(network.fuse(taps), torch.arange(9)[None], cache)
        block = torch.tensor([[3, *[network.shape.mask_token] * 4]])
        states = network.predict(fitted.embedded(block), torch.tensor([9]), cache, 14)
        assert states.dtype == dtype
        made[dtype] = fitted.logits(states)
        assert made[dtype].dtype == torch.float32
    assert 0 < difference(made[torch.bfloat16], made[torch.float32]) < CLOSE


@torch.no_grad()
def test_heads_that_were_trained_here(in_dtype):
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        in_dtype(dtype)
        head = FittedHead.on(trained(), torch.tensor(IDS), llama(), size=6)
        assert head.head.frequencies.dtype == torch.float32
        made[dtype] = eagle3_logits(head, llama().config.hidden_size, late=40)
    assert 0 < difference(made[torch.bfloat16], made[torch.float32]) < CLOSE


def test_a_cpu_computes_in_float32():
    assert dtype_on(llama.__wrapped__().bfloat16()) == torch.float32


@torch.no_grad()
def test_gated_layers_of_published_heads_are_fused_where_kernels_run(in_dtype, tmp_path, monkeypatch):
    """In Triton's interpreter: the same logits from merged weights, of which the head has one copy."""
    pytest.importorskip("triton")
    in_dtype(torch.float32)
    name = EAGLE3[0]
    folder, model = reference.written("eagle3", name, tmp_path), tiny_target(VOCABULARY, hidden_of(name), LAYERS)
    plain = fitted_eagle3(folder, copy.deepcopy(model))
    wanted = eagle3_logits(plain, plain.head.shape.target_hidden, late=20)
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cpu",))
    fused = fitted_eagle3(folder, copy.deepcopy(model))
    assert any(isinstance(part, FusedMLP) for part in fused.head.modules())
    sizes = [sum(weight.numel() for weight in head.head.parameters()) for head in (plain, fused)]
    assert sizes[0] == sizes[1]
    assert (eagle3_logits(fused, fused.head.shape.target_hidden, late=20) - wanted).abs().max() < 1e-4
