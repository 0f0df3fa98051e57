"""Compiled products have the stated rounding, a row's bits are its own, and a head's compiled layer is its network."""

import copy

import numpy as np
import pytest
import torch

from draftproof.core.distribution import DraftVocab
from draftproof.core.draw import CHUNK, chunk_sums, pick
from draftproof.models import compiled_pass
from draftproof.models.blocked import blocked_int4, blocked_int8, unblocked_int4, unblocked_int8
from draftproof.models.compiled_pass import CompiledLinear, compile_linears, compiled_refusal
from draftproof.models.head.compiled import Choice
from draftproof.models.head.network import FittedHead, Head, HeadShape, linear_on
from draftproof.models.head.rows import HeadRows
from draftproof.models.int4_linear import Int4Linear, Int4Weight, int4_weight, pack_int4, unpack
from draftproof.models.int8_linear import Int8Linear, pack_int8, quantise_rows
from models.int4_models import needs_compiled, needs_int4

pytestmark = [needs_int4, needs_compiled]

LEVELS = 32767
VOCABULARY = 1088
"""Tokens of the small head: two chunks of a draw, and a part of one."""
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


def small_head(compiled, bits=4):
    """Return rows of a small head whose layer has four or eight bits; its output rows have four."""
    network = Head(HeadShape(64, 4, 2, 32, 128, 10000.0, 1e-3, (1,))).eval().requires_grad_(False)
    rows = torch.nn.Sequential(linear_on(random(VOCABULARY, 64, seed=6)).requires_grad_(False))
    if bits == 8:
        pack_int8(network)
    for part in (network, rows):
        assert pack_int4(part)
        if compiled:
            compile_linears(part)
    ids = torch.arange(VOCABULARY).flip(0)
    head = FittedHead(network, random(VOCABULARY, 64, seed=3), rows, DraftVocab.of(ids, VOCABULARY))
    pool = HeadRows(head, pages=4)
    assert (pool.compiled is not None) == compiled
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


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.01), (8, 1e-4)])
def test_a_heads_compiled_layer_computes_what_its_network_computes(bits, bound):
    """With four bits its products keep more than torch's, which round inputs and results to bfloat16."""
    for made, expected in zip(head_states(small_head(True, bits)), head_states(small_head(False, bits)), strict=True):
        assert float((made - expected).norm() / expected.norm()) < bound


def test_eight_bits_are_nearer_to_a_heads_weights_than_four():
    exact = Head(HeadShape(64, 4, 2, 32, 128, 10000.0, 1e-3, (1,))).eval().requires_grad_(False)
    x = random(5, 64, seed=8)
    errors = {}
    for bits in (4, 8):
        quantised = copy.deepcopy(exact)
        assert pack_int4(quantised) if bits == 4 else pack_int8(quantised) is None
        compile_linears(quantised)
        made = CompiledLinear.within(quantised.gate_up)(x)
        errors[bits] = float((made - exact.gate_up(x)).norm() / exact.gate_up(x).norm())
    assert errors[8] < 0.01 < 0.05 < errors[4]


@pytest.mark.parametrize("compiled", [True, False])
def test_entries_that_are_only_written_have_the_bits_of_those_that_are_computed(compiled):
    whole, written = small_head(compiled), small_head(compiled)
    tokens, h, rows = torch.arange(20) % 7, random(20, 64, seed=3), ([1, 2], [0, 2], [13, 7])
    for pool in (whole, written):
        for buffer in (*pool.pool.keys, *pool.pool.values):
            buffer.zero_()
    whole.packed_states(tokens, h, *rows)
    written.write(tokens, h, *rows)
    for made, expected in zip(
        (written.pool.keys[0], written.pool.values[0]), (whole.pool.keys[0], whole.pool.values[0]), strict=True
    ):
        assert expected.count_nonzero() > 19 * expected[0].numel()
        assert torch.equal(made, expected)


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


@pytest.mark.parametrize("rows", [64, 1088])
def test_layouts_are_read_back_as_they_were(rows):
    """1088 rows are laid out in two parts."""
    weights = [int4_weight(random(rows, 96, seed=seed)) for seed in (0, 1)]
    both = blocked_int4(*weights)
    for made, weight in zip((unblocked_int4(both[0::2]), unblocked_int4(both[1::2])), weights, strict=True):
        assert torch.equal(made.packed, weight.packed)
        assert torch.equal(made.scales_and_zeros, weight.scales_and_zeros)
    codes, _ = quantise_rows(random(rows + 7, 96))
    assert torch.equal(unblocked_int8(blocked_int8(codes), rows + 7), codes)


# ------------------------------------------------------------------------------------------------ a draft in one call

TAPS, FOLLOW = [random(7, 64, seed=4)], torch.tensor([1, 2, 3, 4, 5, 6, 7])


def uniforms(depths, rows, seed=7):
    return torch.rand((depths, rows, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def choice(scales, lengths, confidence=0.0, seed=7):
    scales = torch.tensor(scales, dtype=torch.float64)
    return Choice(scales, uniforms(max(lengths), len(lengths), seed), torch.tensor(lengths), confidence)


def drafted(pool, how):
    """Draft for two rows after texts of three and four tokens."""
    return pool.draft(None, TAPS, FOLLOW, [1, 2], [0, 0], [3, 4], how)


@pytest.mark.parametrize("scale", [0.0, 1.25])
def test_a_draft_in_one_call_has_the_bits_of_single_steps(scale):
    pool, steps = small_head(True), small_head(True)
    chain, fused = drafted(pool, choice([scale, scale], [4, 4]))
    assert torch.equal(fused, steps.fuse(TAPS))
    h = steps.packed_states(FOLLOW, fused, [1, 2], [0, 0], [3, 4])[[2, 6]]
    for depth in range(4):
        logits = steps.logits(h)
        assert torch.equal(chain.logits[depth], logits)
        tokens = steps._head.vocab.ids[chain.entries[depth]]
        h = steps.packed_states(tokens, h, [1, 2], [3 + depth, 4 + depth], [1, 1])
    assert chain.lengths.tolist() == [4, 4]


def test_states_read_before_give_the_same_draft():
    pool, steps = small_head(True), small_head(True)
    chain, fused = drafted(pool, choice([1.0, 1.0], [3, 3]))
    h = steps.packed_states(FOLLOW, fused, [1, 2], [0, 0], [3, 4])[[2, 6]]
    again, nothing = steps.draft(h, (), FOLLOW[:0], [1, 2], [2, 3], [1, 1], choice([1.0, 1.0], [3, 3]))
    assert nothing is None
    assert torch.equal(again.entries, chain.entries)
    assert torch.equal(again.logits, chain.logits)


@pytest.mark.parametrize("temperature", [0.8, 3.0, 30.0])
def test_entries_are_drawn_from_the_distributions_that_are_reported(temperature):
    """The draw is core/draw.pick's for the same random numbers, and the sums are log-sum-exps."""
    scale = 1 / temperature
    chunks = set()
    for seed in range(20):
        how = choice([scale, scale], [4, 4], seed=seed)
        chain, _ = drafted(small_head(True), how)
        scaled = chain.logits.double() * scale
        torch.testing.assert_close(chain.sums, scaled.logsumexp(-1), rtol=0, atol=1e-6)
        weights = scaled.softmax(-1)
        for depth in range(4):
            for row in range(2):
                here = weights[depth, row]
                expected = pick(here.numpy(), chunk_sums(here).numpy(), *how.uniforms[depth, row].tolist())
                assert int(chain.entries[depth, row]) == expected
                chunks.add(expected // CHUNK)
    assert temperature < 30 or chunks == {0, 1, 2}, "some draws are from each chunk"


def test_greedy_rows_take_the_likeliest_entry_and_end_where_they_are_unsure():
    chain, _ = drafted(small_head(True), choice([0.0, 0.0], [6, 6]))
    log_probs = chain.logits.double().log_softmax(-1)
    assert torch.equal(chain.entries, log_probs.argmax(-1))
    paths = log_probs.amax(-1).cumsum(0).exp()
    confidence = float(paths[2, 0] + paths[1, 0]) / 2
    expected = [int((paths[:, row] >= confidence).sum()) + 1 for row in range(2)]
    ended, _ = drafted(small_head(True), choice([0.0, 0.0], [6, 6], confidence))
    assert ended.lengths.tolist() == expected
    assert expected[0] == 3, "the token at which the path becomes unlikely is the last"


def test_a_draft_has_the_same_bits_alone_and_with_any_threads():
    together, _ = drafted(small_head(True), choice([1.25, 0.5], [4, 4]))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for row, part in ((0, slice(0, 3)), (1, slice(3, 7))):
                how = choice([1.25, 0.5], [4, 4])
                own = Choice(how.scales[row : row + 1], how.uniforms[:, row : row + 1].contiguous(), how.lengths[:1], 0)
                pool = small_head(True)
                chain, _ = pool.draft(None, [TAPS[0][part]], FOLLOW[part], [row + 1], [0], [3 + row], own)
                assert torch.equal(chain.logits[:, 0], together.logits[:, row])
                assert torch.equal(chain.entries[:, 0], together.entries[:, row])
                assert torch.equal(chain.sums[:, 0], together.sums[:, row])
    finally:
        torch.set_num_threads(before)


def test_without_numba_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiled_pass, "find_spec", lambda name: None)
    compiled_refusal.cache_clear()
    try:
        assert "draftproof[cpu]" in compiled_refusal()
    finally:
        monkeypatch.undo()
        compiled_refusal.cache_clear()
