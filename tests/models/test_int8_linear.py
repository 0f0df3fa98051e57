"""Eight-bit layers: the error is that of rounding weights, and a row has the same bits in any company."""

import copy

import pytest
import torch

from draftproof.models.int8_linear import Int8Linear, quantise_rows


def layer_and_weight(out=500, width=96):
    weight = torch.randn((out, width), generator=torch.Generator().manual_seed(0))
    return Int8Linear(*quantise_rows(weight)), weight


def rounded(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize("spread", [1e-3, 1.0, 50.0])
def test_only_the_weights_are_rounded_to_eight_bits(spread):
    layer, weight = layer_and_weight()
    x = torch.randn((9, 96), generator=torch.Generator().manual_seed(1)) * spread
    x[0, 5] *= 40  # an outlier costs its own row precision, not the others
    made, exact = layer(x), x.double() @ rounded(weight).double().T
    step = x.abs().amax(1, keepdim=True) / 127 / 254  # of the fine part
    assert bool(((made.double() - exact).abs() <= step * rounded(weight).abs().sum(1) * 0.51 + 1e-4 * spread).all())
    one_part = (x / (254 * step)).round() * 254 * step  # control: eight bits of inputs alone are 100 times coarser
    coarse = (one_part.double() @ rounded(weight).double().T - exact).norm()
    assert float((made.double() - exact).norm()) < 0.02 * float(coarse)


def test_a_row_has_the_same_bits_among_any_number_of_others():
    layer, _ = layer_and_weight()
    x = torch.randn((40, 96), generator=torch.Generator().manual_seed(2))
    together = layer(x)
    for rows in (1, 2, 3, 4, 5, 8, 16, 33):
        assert torch.equal(layer(x[:rows]), together[:rows])


def test_zeros_bias_shapes_and_copies():
    weight = torch.randn(16, 32)
    weight[3] = 0
    layer = Int8Linear(*quantise_rows(weight), torch.arange(16.0), table=weight)
    assert torch.equal(layer(torch.zeros(2, 1, 32)), torch.arange(16.0).expand(2, 1, 16))
    assert float(layer(torch.ones(1, 32))[0, 3]) == 3
    assert layer.weight is weight
    assert copy.deepcopy(layer) is layer
