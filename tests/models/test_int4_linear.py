"""Four-bit layers hold a file's weights after the stated rounding, bit for bit, and give a row the same bits always."""

import copy

import numpy as np
import pytest
import torch

from draftproof.models.gguf import Gguf
from draftproof.models.int4_linear import (
    Int4Linear,
    Int4Weight,
    codes_of,
    cut,
    int4_weight,
    join,
    join_linears,
    pack_groups,
    quantise_groups,
    reordered,
    unpack,
)
from models.gguf_files import gguf_bytes, random_blocks

OUT, IN = 192, 512


def of_file(tmp_path, kind):
    """Return a random matrix of a GGUF file: its groups, and packed."""
    content = random_blocks(kind, (OUT, IN), np.random.default_rng(0))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, {"matrix": (kind, (OUT, IN), content)}))
    groups = [torch.from_numpy(part) for part in Gguf(path).groups("matrix")]
    return groups, pack_groups(*groups)


def rounded(codes, scale, minimum):
    """Return the weights after the stated rounding, by its definition."""
    zero = (minimum + 8 * scale).bfloat16().float()
    parts = codes.float().unflatten(1, (-1, 32)) - 8
    return (parts * scale.bfloat16().float()[..., None] + zero[..., None]).flatten(1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_packed_weights_are_the_files_after_the_stated_rounding(tmp_path, kind):
    groups, weight = of_file(tmp_path, kind)
    assert torch.equal(unpack(weight), rounded(*groups))


@pytest.mark.parametrize("defect", ["groups reversed", "scale and zero swapped", "codes of the other half", "strided"])
def test_a_wrong_layout_is_caught(tmp_path, defect):
    """The comparison above fails on each of these, so it can fail."""
    (codes, scale, minimum), weight = of_file(tmp_path, "Q4_1")
    wrong = {
        "groups reversed": lambda: pack_groups(codes, scale.flip(1), minimum.flip(1)),
        "scale and zero swapped": lambda: Int4Weight(weight.packed, weight.scales_and_zeros.flip(2).contiguous()),
        "codes of the other half": lambda: pack_groups(codes.roll(16, 1), scale, minimum),
        "strided": lambda: Int4Weight(
            weight.packed, weight.scales_and_zeros.transpose(0, 1).contiguous().transpose(0, 1)
        ),
    }[defect]()
    assert not torch.equal(unpack(wrong), rounded(codes, scale, minimum)) or not torch.equal(
        product(wrong), product(weight)
    )


def inputs(rows, seed=0, width=IN):
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(weight):
    return weight.product(inputs(4, width=weight.in_features))


def test_the_product_is_that_of_the_unpacked_matrix(tmp_path):
    _, weight = of_file(tmp_path, "Q4_1")
    x = inputs(7)
    exact = x.double() @ unpack(weight).double().T
    # Weights and the result are rounded to bfloat16, a relative 2⁻⁹ each; sums are in float32.
    scale = (x.double().abs() @ unpack(weight).double().abs().T).clamp_min(1e-9)
    assert float(((weight.product(x).double() - exact).abs() / scale).max()) < 2**-7


@pytest.mark.parametrize(("out", "width"), [(960, 576), (576, 1536), (192, 64), (16, 32)])
def test_a_row_has_the_same_bits_among_any_number_of_others(out, width):
    weight = int4_weight(torch.randn((out, width), generator=torch.Generator().manual_seed(1)))
    x = inputs(70, width=width)
    together = weight.product(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 17, 64):
        assert torch.equal(weight.product(x[:rows].contiguous()), together[:rows])
        assert torch.equal(weight.product(x[-rows:].contiguous()), together[-rows:])


def test_matrices_are_joined_and_cut_without_another_bit():
    parts = [int4_weight(torch.randn(out, IN, generator=torch.Generator().manual_seed(out))) for out in (128, 64, 192)]
    whole, x = join(parts), inputs(3)
    assert torch.equal(whole.product(x), torch.cat([part.product(x) for part in parts], 1))
    middle = cut(whole, 128, 192)
    assert torch.equal(unpack(middle), unpack(parts[1]))
    assert middle.packed.data_ptr() == whole.packed[128:].data_ptr()
    with pytest.raises(ValueError, match=r"matrices of \[48, 64\] rows cannot be joined"):
        join([int4_weight(torch.randn(48, IN)), parts[1]])


def test_joined_layers_share_their_codes():
    layers = [Int4Linear(int4_weight(torch.randn(out, IN))) for out in (128, 64)]
    before = [layer(torch.ones(1, IN)) for layer in layers]
    whole = join_linears(layers)
    assert join_linears(layers) is whole
    assert layers[1].int4.packed.data_ptr() == whole.packed[128:].data_ptr()
    assert all(torch.equal(layer(torch.ones(1, IN)), made) for layer, made in zip(layers, before, strict=True))


def test_quantising_rounds_to_the_nearest_step():
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(2))
    weight[3, 32:64] = 0.25  # a constant group
    codes, scale, minimum = quantise_groups(weight)
    made = unpack(pack_groups(codes, scale, minimum))
    error = (made - weight).abs().unflatten(1, (-1, 32))
    # Half a step, and the rounding of scale and zero: a relative 2⁻⁹ of up to eight steps and of the zero.
    zero = (minimum + 8 * scale).abs()
    assert bool((error <= (0.5 * scale + 8 * scale * 2**-9 + (zero + 1e-6) * 2**-8)[..., None]).all())
    assert float((made - weight).norm() / weight.norm()) < 0.1


def test_a_layer_keeps_shapes_and_dtype_and_is_shared_by_copies():
    layer = Int4Linear(int4_weight(torch.randn(64, 32)), torch.ones(64))
    assert layer(torch.zeros(2, 3, 32)).shape == (2, 3, 64)
    assert torch.equal(layer(torch.zeros(1, 32)), torch.ones(1, 64))
    assert layer(torch.zeros(1, 32).bfloat16()).dtype == torch.bfloat16
    assert copy.deepcopy(layer) is layer


def test_a_shape_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"codes \(64, 48\) .*columns of 32"):
        pack_groups(torch.zeros(64, 48, dtype=torch.uint8), torch.ones(64, 1), torch.ones(64, 1))


def test_codes_are_read_back_and_rows_can_be_put_in_another_order(tmp_path):
    (codes, *_), weight = of_file(tmp_path, "Q4_1")
    assert torch.equal(codes_of(weight), codes)
    order = torch.randperm(OUT, generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpack(reordered(weight, order)), unpack(weight)[order])
    assert not torch.equal(unpack(reordered(weight, order)), unpack(weight))
