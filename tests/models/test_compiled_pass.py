"""Compiled products have the stated rounding, a row's bits are its own, and a head's compiled layer is its network."""

import numpy as np
import pytest
import torch

from draftproof.core.distribution import DraftVocab
from draftproof.models import compiled_pass
from draftproof.models.compiled_pass import CompiledLinear, blocked_int4, compile_linears, compiled_refusal
from draftproof.models.head.network import FittedHead, Head, HeadShape
from draftproof.models.head.rows import HeadRows
from draftproof.models.int4_linear import Int4Linear, Int4Weight, int4_weight, pack_int4, unpack
from draftproof.models.int8_linear import Int8Linear, quantise_rows
from models.int4_models import needs_compiled, needs_int4

pytestmark = [needs_int4, needs_compiled]

LEVELS = 32767
LINEAGE = torch.tensor([[[True, True, False, True, False], [True, False, True, False, True]]])
"""A root with two children, each of which has a child: what the two of the last level attend to."""


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x):
    """Return inputs as the products round them, in float64: sixteen bits, one step for each row."""
    largest = x.abs().amax(1, keepdim=True)
    factor = torch.full_like(largest, LEVELS) / largest  # LEVELS / largest would multiply with a rounded reciprocal
    return (x * factor).round().double() * (largest.double() / LEVELS)


def linears(inputs=96, outputs=128):
    weight = random(outputs, inputs)
    codes, scale = quantise_rows(weight)
    four = int4_weight(weight)
    return {
        "int4": (CompiledLinear.of(Int4Linear(four)), unpack(four).double()),
        "int8": (CompiledLinear.of(Int8Linear(codes, scale)), (codes * scale[:, None].double())),
    }


@pytest.mark.parametrize("bits", ["int4", "int8"])
@pytest.mark.parametrize("inputs", [32, 96, 576])
def test_products_are_those_of_inputs_of_sixteen_bits(bits, inputs):
    """In float64 the same product differs by the rounding of float32 sums only: 2⁻²² of what is summed."""
    product, matrix = linears(inputs)[bits]
    x = random(7, inputs, seed=1) * torch.logspace(-3, 3, 7)[:, None]
    bound = rounded(x).abs() @ matrix.abs().T
    error = (product(x).double() - rounded(x) @ matrix.T).abs()
    assert float((error / bound).max()) < 2**-22
    assert float((error.max(1).values / (x.double() @ matrix.T).abs().max(1).values).max()) < 1e-4


def test_a_wrong_group_order_and_a_swapped_scale_and_zero_would_show():
    weight = int4_weight(random(128, 96))
    x, swapped = random(3, 96, seed=1), weight.scales_and_zeros.flip(2).contiguous()
    expected = rounded(x) @ unpack(weight).double().T
    for wrong in (swapped, weight.scales_and_zeros.flip(0).contiguous()):
        made = CompiledLinear.of(Int4Linear(Int4Weight(weight.packed, wrong)))(x)
        assert float((made - expected).norm() / expected.norm()) > 0.1


def test_codes_stay_as_they_are():
    """Each nibble of the layout is the code that the docstring says."""
    weight = int4_weight(random(64, 64))
    words = blocked_int4(weight)[:, :, :256].contiguous().numpy().view(np.uint32).reshape(4, 2, 4, 16)
    scale, zero = weight.scales_and_zeros.float().unbind(-1)
    matrix = unpack(weight)
    for o, i in [(0, 0), (17, 3), (40, 33), (63, 62), (5, 29)]:
        q, j, p = i % 32 // 8, i % 8 // 2, i % 2
        code = int(words[o // 16, i // 32, q, o % 16]) >> (4 * j + 16 * p) & 15
        assert float(matrix[o, i]) == pytest.approx(float(scale[i // 32, o] * (code - 8) + zero[i // 32, o]), abs=1e-6)


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_a_row_has_the_same_bits_among_any_others_and_with_any_threads(bits):
    product, _ = linears()[bits]
    x, before = random(11, 96, seed=2), torch.get_num_threads()
    alone = torch.cat([product(row[None]) for row in x])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 4, 5, 8, 9, 11):
                assert torch.equal(product(x[-count:]), alone[-count:])
    finally:
        torch.set_num_threads(before)


def small_head(compiled):
    network = Head(HeadShape(64, 4, 2, 32, 128, 10000.0, 1e-3, (1,))).eval().requires_grad_(False)
    rows = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).requires_grad_(False)
    assert pack_int4(network)
    if compiled:
        compile_linears(network)
    head = FittedHead(network, random(10, 64, seed=3), rows, DraftVocab.of(torch.arange(10), 10))
    pool = HeadRows(head, pages=4)
    if not compiled:
        pool._compiled = None
    for row in (1, 2):
        pool.pool.enter(row, 30)
    return pool


def head_states(pool):
    """Return states after texts of two rows, and after a level of a tree."""
    tokens, h = torch.tensor([1, 2, 3, 4, 5, 6, 7]), random(7, 64, seed=4)
    first = pool.packed_states(tokens, h, [1, 2], [0, 0], [3, 4])
    pool.packed_states(tokens[:6], h[:6], [1, 2], [3, 4], [3, 3])
    second = pool.packed_level(
        torch.tensor([[8, 9], [1, 2]]), random(2, 2, 64, seed=5), [1, 2], [3, 4], LINEAGE.repeat(2, 1, 1)
    )
    return first, second


def test_a_heads_compiled_layer_computes_what_its_network_computes():
    """Its products keep more bits than torch's, which round inputs and results to bfloat16."""
    for made, expected in zip(head_states(small_head(True)), head_states(small_head(False)), strict=True):
        assert float((made - expected).norm() / expected.norm()) < 0.01


def test_a_level_of_a_tree_does_not_read_other_branches():
    """The second node's keys are overwritten: the first child does not see them, the second does."""
    levels = []
    for changed in (False, True):
        pool = small_head(True)
        head_states(pool)
        if changed:
            for buffers in (pool.pool.keys, pool.pool.values):
                buffers[0][pool._start(1) + 3 + 2] += 1.0
        levels.append(pool.packed_level(torch.tensor([[8, 9]]), random(1, 2, 64, seed=5), [1], [3], LINEAGE)[0])
    assert torch.equal(levels[0][0], levels[1][0])
    assert not torch.equal(levels[0][1], levels[1][1])


def test_without_numba_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiled_pass, "find_spec", lambda name: None)
    compiled_refusal.cache_clear()
    try:
        assert "draftproof[cpu]" in compiled_refusal()
    finally:
        monkeypatch.undo()
        compiled_refusal.cache_clear()
