"""Packed float32 layers give what unpacked ones give."""

import copy

import pytest
import torch
from torch import nn

from draftproof.models.cpu_linear import PackedLinear, join, joinable, pack, packable, padded_rows
from draftproof.models.hf import HFModel
from models.families import family
from models.reference import TOLERANCE, Rows
from models.test_hf import TEXTS, alone

pytestmark = pytest.mark.skipif(not packable(nn.Linear(2, 2)), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 33])
def test_any_number_of_rows_gives_what_an_unpacked_layer_gives(rows, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 130, bias=bias)
    x = torch.randn(2, rows, 48)
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


def test_products_have_few_numbers_of_rows():
    """oneDNN keeps a kernel for each; padding costs little and is cut off."""
    sizes = range(1, 1025)
    assert len({padded_rows(n) for n in sizes}) == 16 + 5 * 8 + 16 + 1  # 42: see BEFORE_A_STEP
    assert all(n <= padded_rows(n) <= 1.125 * n for n in sizes)
    torch.manual_seed(0)
    layer, x = PackedLinear(nn.Linear(48, 130)), torch.randn(3, 43, 48)
    with torch.inference_mode():
        assert layer(x).shape == (3, 43, 130)
        assert torch.equal(layer(x).view(129, -1)[:33], layer(x.view(129, 48)[:33]))


def layers(bias, sizes=(64, 32, 32)):
    torch.manual_seed(0)
    return [PackedLinear(nn.Linear(48, size, bias=bias)) for size in sizes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [2, 3, 8, 33, 70])
def test_joined_layers_keep_their_bits_and_hold_no_second_copy(rows, bias):
    parts, x = layers(bias), torch.randn(rows, 48)
    with torch.inference_mode():
        apart = [part(x) for part in parts]
        matrices = [part.packed.to_dense() for part in parts]
        whole = join(parts)
        assert torch.equal(whole(x), torch.cat(apart, 1))
        assert all(torch.equal(part(x), own) for part, own in zip(parts, apart, strict=True))
        assert all(torch.equal(part.packed.to_dense(), own) for part, own in zip(parts, matrices, strict=True))
    assert all(part.place.packed is None for part in parts)
    assert joinable(parts)
    assert join(parts) is whole


def test_parts_of_a_joined_layer_share_a_product_of_one_input_only():
    parts = layers(False)
    whole, products = join(parts), []
    whole.register_forward_hook(lambda module, inputs, output: products.append(inputs[0]))
    one, other = torch.randn(2, 4, 48).unbind()
    with torch.inference_mode():
        wanted = whole(other)[:, 64:96]
        products.clear()
        for part in parts:
            part(one)
        assert len(products) == 1
        parts[0](one)
        assert torch.equal(parts[1](other), wanted)
        parts[2](other)
        parts[2](other)  # after the last part nothing is kept
    assert len(products) == 4


def test_what_differs_in_input_or_bias_is_not_joined():
    first, second = layers(False, (64, 32))
    assert joinable([first, second])
    assert not joinable([first, PackedLinear(nn.Linear(48, 32))])
    assert not joinable([first, PackedLinear(nn.Linear(40, 32, bias=False))])
    assert not joinable([first, nn.Linear(48, 32, bias=False)])
    join([first, second])
    assert not joinable([first, PackedLinear(nn.Linear(48, 32, bias=False))])


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_a_packed_model_is_served_like_the_unpacked_one(name):
    model = family(name)
    ours = family(name)
    pack(ours)
    served = HFModel(ours)
    rows = Rows(served, served.new_cache(3), TEXTS)
    for accepted in ([0, 4, 2], [4, 0, 1]):
        assert rows.chain_round(4, accepted, alone(model)) < TOLERANCE


def test_every_linear_layer_is_packed_once_and_shared_by_copies():
    ours = family("llama")
    packing = pack(ours)
    assert packing.layers == 3 * 7 + 1
    assert not any(type(module) is nn.Linear for module in ours.modules())
    assert copy.deepcopy(ours).lm_head is ours.lm_head
    assert HFModel(ours).first_layers(1).vocab_size == 61


@pytest.mark.parametrize("tied", [True, False])
def test_only_a_weight_that_another_module_uses_costs_memory(tied):
    ours = family("llama")
    if tied:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    assert pack(ours).added_bytes == (61 * 32 * 4 if tied else 0)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="must be float32 on a CPU"):
        pack(family("llama").double())
