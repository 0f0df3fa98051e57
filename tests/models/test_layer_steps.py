"""The steps of a layer give what torch's modules give, compiled or not, and a row's bits are its own."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from draftproof.models import layer_steps

HEADS, SHARED, SIZE, SLOTS = 4, 2, 16, 40


@pytest.fixture(params=["compiled", "torch"])
def _either(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(layer_steps, "compiled_layer", lambda: None)
    else:
        pytest.importorskip("numba")


def numbers(*shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x, cos, sin):
    width = cos.shape[1]
    turned, half = x[..., :width], width // 2
    other = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    return torch.cat([turned * cos[:, None] + other * sin[:, None], x[..., width:]], -1)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("plus_one", [True, False])
def test_the_norm_is_that_of_its_formula(plus_one):
    x, weight = numbers(2, 7, 50), numbers(50, seed=1)
    made = layer_steps.rms_norm(x, weight, 1e-2, plus_one=plus_one)
    wanted = normed(x, weight + plus_one, 1e-2)
    assert torch.allclose(made, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(made, normed(x, weight + plus_one, 2e-2), rtol=1e-5, atol=1e-6)
    across = x.transpose(0, 1)
    assert torch.equal(layer_steps.rms_norm(across, weight, 1e-2, plus_one=plus_one), made.transpose(0, 1))


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("tanh", [True, False])
def test_the_gate_is_that_of_torch(tanh):
    both = numbers(2, 7, 100)
    both[0, 0, 0], both[0, 0, 1] = 200.0, -200.0
    first, second = both.double().chunk(2, -1)
    wanted = (gelu(first, approximate="tanh") if tanh else silu(first)) * second
    assert torch.allclose(layer_steps.gate(both.clone(), tanh=tanh).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rotary", [SIZE, SIZE // 2])
def test_queries_are_rotated_and_keys_and_values_written(rotary, normalised):
    N, slots = 5, torch.tensor([3, 4, 39, 1, 0])
    qkv, cos, sin = numbers(N, (HEADS + 2 * SHARED) * SIZE), numbers(N, rotary, seed=2), numbers(N, rotary, seed=3)
    keys, values = (torch.full((SLOTS, SHARED, SIZE), torch.nan) for _ in range(2))
    norms = (numbers(SIZE, seed=4), numbers(SIZE, seed=5)) if normalised else None
    made = layer_steps.rotate_and_write(
        qkv.clone(), cos, sin, keys, values, slots, heads=HEADS, norms=norms, eps=1e-3, plus_one=True
    )
    q, k, v = qkv.view(N, -1, SIZE).split([HEADS, SHARED, SHARED], 1)
    if norms is not None:
        q, k = normed(q, norms[0] + 1, 1e-3), normed(k, norms[1] + 1, 1e-3)
    assert torch.allclose(made, rotated(q, cos, sin), rtol=1e-5, atol=1e-5)
    assert torch.allclose(keys[slots], rotated(k, cos, sin), rtol=1e-5, atol=1e-5)
    assert torch.equal(values[slots], v)
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, slots, False)
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


@pytest.mark.parametrize("size", [48, 50])
def test_a_row_has_the_same_bits_alone_and_among_others(size):
    """Also where a size is no multiple of a vector, and where others make the call run on several threads."""
    pytest.importorskip("numba")
    x, both, weight = numbers(300, size), numbers(300, 2 * size), numbers(size, seed=1)
    assert x.numel() > layer_steps.FEW_NUMBERS
    norm, gated = layer_steps.rms_norm(x, weight, 1e-5), layer_steps.gate(both)
    for row in (0, 7, 299):
        assert torch.equal(layer_steps.rms_norm(x[row : row + 1], weight, 1e-5)[0], norm[row])
        assert torch.equal(layer_steps.gate(both[row : row + 1])[0], gated[row])
