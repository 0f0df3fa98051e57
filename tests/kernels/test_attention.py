"""Test decode attention against its reference: every variant, and for each a wrong argument that must not pass."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftproof.kernels import attention
from draftproof.kernels.attention import ancestor_bits, decode_attention
from kernels.attention_cases import VARIANTS, Pass, assert_equal, excess, kernel, make, random_pass

LENGTHS = [150, 3]  # two splits, and one


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Split short rows too, and load few keys at a time, so that small shapes take every path."""
    monkeypatch.setattr(attention, "LEAST_KEYS", 64)
    monkeypatch.setattr(attention, "TILE_BYTES", 4096)


@pytest.mark.parametrize("variant", [(), *((name,) for name in VARIANTS), ("tree", "window"), ("tree", "alibi")])
def test_a_pass_gives_the_reference_attention(variant, device):
    assert_equal(make(LENGTHS, variants=variant, device=device, widths=[3, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_reference_attention(dtype, device):
    assert_equal(make(LENGTHS, dtype=dtype, device=device, variants=("softcap",)))


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 100))])
def test_any_pass_gives_the_reference_attention(seed, device):
    assert_equal(random_pass(seed, most=300, rows=1 + seed % 2, T=1 + seed % 9, device=device))


def wrong_ancestor(given: Pass) -> dict[str, object]:
    ancestors = given.options["ancestors"].clone()
    ancestors[0, 2, 0] ^= True
    return {"ancestors": ancestors}


WRONG = {
    "window one too long": (("window",), lambda given: {"window": given.options["window"] + 1}),
    "window one too short": (("window",), lambda given: {"window": given.options["window"] - 1}),
    "window left out": (("window",), lambda given: {"window": None}),
    "chunk one too long": (("chunk",), lambda given: {"chunk": given.options["chunk"] + 1}),
    "softcap left out": (("softcap",), lambda given: {"softcap": None}),
    "softcap 20 % larger": (("softcap",), lambda given: {"softcap": given.options["softcap"] * 1.2}),
    "sinks left out": (("sinks",), lambda given: {"sinks": None}),
    "sinks of other heads": (("sinks",), lambda given: {"sinks": given.options["sinks"].roll(1)}),
    "slopes left out": (("alibi",), lambda given: {"alibi_slopes": None}),
    "slopes of other heads": (("alibi",), lambda given: {"alibi_slopes": given.options["alibi_slopes"].roll(1)}),
    "a wrong ancestor": (("tree",), wrong_ancestor),
    "ancestors left out": (("tree",), lambda given: {"ancestors": None}),
    "positions left out, window": (("tree", "window"), lambda given: {"positions": None}),
    "positions left out, ALiBi": (("tree", "alibi"), lambda given: {"positions": None}),
    "scale 2 % larger": ((), lambda given: {"scale": given.options["scale"] * 1.02}),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_does_not_pass(case, dtype, device):
    variants, change = WRONG[case]
    # keys enough for two splits, and few inside a limit, so that one key more or less has weight
    given = make([150], T=6, variants=variants, window=5, chunk=50, seed=5, dtype=dtype, device=device)
    with pytest.raises(AssertionError, match="times the error that rounding explains"):
        assert_equal(given, **change(given))


@pytest.mark.parametrize("wrong", ["lengths", "starts", "widths"])
def test_a_row_that_is_one_off_does_not_pass(wrong, device):
    given = make([20], widths=[2], device=device)
    assert excess(kernel(replace(given, **{wrong: getattr(given, wrong) - 1})), given) > 1


def test_a_row_has_the_same_bits_alone_and_in_a_batch(device):
    given = make(LENGTHS, dtype=torch.bfloat16, variants=("tree", "window", "sinks"), window=140, device=device)
    together = kernel(given)
    for b in range(2):
        assert torch.equal(kernel(given.row(b))[0], together[b])


def test_the_programs_of_a_row_and_the_capacity_do_not_change_a_bit(monkeypatch, device):
    given = make([290, 10], T=2, device=device)
    many = kernel(given)
    assert torch.equal(kernel(given, capacity=292), many)
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    monkeypatch.setattr(attention, "LEAST_PROGRAMS", 1)
    assert torch.equal(kernel(given), many)


def test_rows_of_a_size_that_is_never_split_need_one_launch(device):
    given = make(LENGTHS, device=device)
    calls = [attention.AttentionCall(*given.tensors(), 1.0, capacity, *[None] * 7) for capacity in (None, 127)]
    plans = [attention.plan_attention(call, torch.empty_like(call.query), overlap=False) for call in calls]
    assert [[step.kernel.__name__ for step in plan] for plan in plans] == [["attend", "merge"], ["attend"]]


def test_a_capacity_below_the_length_costs_nothing_but_speed(device):
    assert_equal(make([290, 10], T=2, device=device), capacity=130)


def test_rows_of_width_0_and_padding_tokens_are_0(device):
    given = make([20, 200, 0], T=3, widths=[0, 1, 0], variants=("sinks",), device=device)
    given = replace(given, query=given.query.clone().index_fill_(0, torch.tensor([0, 2], device=device), torch.nan))
    out = kernel(given)
    assert out[0].eq(0).all()
    assert out[1, 1:].eq(0).all()
    assert out[2].eq(0).all()


def test_bits_of_ancestors_reach_to_the_64th_token(device):
    given = make([5], T=64, heads=2, kv_heads=1, variants=("tree",), device=device)
    bits = ancestor_bits(given.options["ancestors"])
    assert bits[0, 63] < 0  # a token is its own ancestor: the sign bit
    assert_equal(given)
    assert torch.equal(kernel(given), kernel(given, ancestors=bits))


def test_the_query_may_be_part_of_a_wider_tensor(device):
    given = make([30, 4], device=device)
    wide = torch.cat([given.query, torch.full_like(given.query, torch.nan)], 2)
    assert torch.equal(kernel(replace(given, query=wide[:, :, :4])), kernel(given))


def test_indices_may_be_int32(device):
    given = make([30, 4], variants=("tree", "window"), widths=[2, 3], window=9, device=device)
    small = replace(given, starts=given.starts.int(), lengths=given.lengths.int(), widths=given.widths.int())
    assert torch.equal(kernel(small, positions=given.options["positions"].int()), kernel(given))


def test_a_batch_of_no_rows_gives_no_attention(device):
    empty = torch.zeros(0, dtype=torch.long, device=device)
    pool = torch.zeros(8, 2, 16, device=device)
    out = decode_attention(torch.zeros(0, 1, 4, 16, device=device), pool, pool, empty, empty, scale=1.0)
    assert out.shape == (0, 1, 4, 16)


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_kernels_compile_without_a_gpu(capability, tmp_path):
    program = Path(__file__).parent / "compile_attention.py"
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(program), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[::2] == ["attend", "merge"] * 3


REFUSED = {
    "T": (lambda g: {"query": g.query.expand(2, 3, 4, 16)[:, :1].expand(2, 65, 4, 16)}, "at most 64 tokens"),
    "heads": (lambda g: {"query": g.query[:, :, :3]}, "multiple of their heads"),
    "size": (lambda g: {"query": g.query[..., :8]}, "must have the size of keys"),
    "dtype": (lambda g: {"keys": g.keys.half()}, "keys must be .* torch.float32 like query"),
    "slots": (lambda g: {"values": g.values[1:]}, "of the same slots and heads"),
    "starts": (lambda g: {"starts": g.starts[:1]}, r"starts must be int32 or int64 \[2\]"),
    "lengths": (lambda g: {"lengths": g.lengths.float()}, "lengths must be int32 or int64"),
    "window": (lambda g: {"options": g.options | {"window": 0}}, "window must be above 0, or None for no limit; got 0"),
    "ancestors": (lambda g: {"options": g.options | {"ancestors": g.lengths}}, r"ancestors must be int64 \[2, 3\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_shapes_are_refused_by_name(case):
    change, words = REFUSED[case]
    given = make([5, 6])
    with pytest.raises(ValueError, match=words):
        kernel(replace(given, **change(given)))
