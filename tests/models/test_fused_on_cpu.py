"""Fused layers of packed models on a CPU give the logits of the modules they replace, and share their weights."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from draftproof.models import layer_steps, packed
from draftproof.models.cpu_linear import PackedLinear, pack, packable
from draftproof.models.fingerprint import fingerprint
from draftproof.models.fused import Fusion
from draftproof.models.hf import HFModel
from draftproof.models.packed import Span
from draftproof.models.pool import KVPool
from kernels.test_fused import FAMILIES, tiny

pytestmark = pytest.mark.skipif(not packable(nn.Linear(2, 2)), reason="this torch has no oneDNN")
TOKENS = [[3, 4, 5, 9, 10], [6, 7, 8, 11]]
TREE = torch.tensor([-1, -1, 0])


def packed_model(family):
    model = tiny(family, "cpu")
    pack(model)
    return model


def passes(served):
    """Return the logits of two rows of 3 tokens, then of 2 more in the first, of 1 in the second, and of a tree."""
    pool = KVPool(served.kv_shapes(), 4, torch.device("cpu"))
    for buffer in (*pool.keys, *pool.values):
        buffer.fill_(torch.nan)
    made = []
    for tokens, spans in (
        ([3, 4, 5, 6, 7, 8], [Span(0, 0, 3), Span(64, 0, 3)]),
        ([9, 10, 11], [Span(0, 3, 2), Span(64, 3, 1)]),
        ([1, 2, 3, 4, 5], [Span(0, 5, 4, TREE), Span(64, 4, 1)]),
    ):
        this = served.packed_pass(torch.tensor(tokens), spans)
        logits, hidden = served.packed(this, pool.keys, pool.values, scored=len(tokens), layers=(1, 2))
        made += [logits, *hidden]
    return made


def is_close(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all((a - b).abs().max() < 1e-4 * b.abs().max() for a, b in pairs)


@pytest.fixture(params=["compiled", "torch"])
def _either(request, monkeypatch):
    if request.param == "torch":
        for module in (layer_steps, packed):
            monkeypatch.setattr(module, "compiled_layer", lambda: None)
    else:
        pytest.importorskip("numba")


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_and_states_are_those_of_the_modules(family):
    model = packed_model(family)
    apart = passes(HFModel(model, probed=True, fused=False))
    served = HFModel(model, probed=True)
    assert served.fusion == replace(FAMILIES[family], rotary=False)
    assert is_close(passes(served), apart)
    text = torch.tensor([TOKENS[0]])
    plain = tiny(family, "cpu")(text).logits[0]
    assert (model(text).logits[0] - plain).abs().max() < 1e-4 * plain.abs().max()  # ours, after joining
    again = HFModel(model, probed=True)
    assert again.fusion == served.fusion
    assert all(torch.equal(a, b) for a, b in zip(passes(again), passes(served), strict=True))


def test_joining_leaves_one_copy_of_the_weights_and_is_no_change_of_the_model():
    model = packed_model("qwen2")  # with biases
    before = fingerprint(model)
    HFModel(model, probed=True)
    assert fingerprint(model) == before
    layers = [module for module in model.modules() if type(module) is PackedLinear]
    assert sum(layer.place.packed is None for layer in layers) == 2 * 5
    wholes = {id(layer.place.part.whole) for layer in layers if layer.place.part is not None}
    assert len(wholes) == 2 * 2
    assert copy.deepcopy(model).model.layers[0].mlp.up_proj is model.model.layers[0].mlp.up_proj


def test_a_model_object_keeps_its_modules():
    model = tiny("llama", "cpu")
    kinds = [type(module) for module in model.modules()]
    assert HFModel(model, probed=True).fusion == Fusion()
    assert [type(module) for module in model.modules()] == kinds


def test_weights_of_norms_that_change_in_place_are_followed():
    model = packed_model("llama")
    served = HFModel(model, probed=True)
    before = passes(served)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    changed = passes(HFModel(model, probed=True, fused=False))
    assert is_close(passes(served), changed)
    assert not is_close(before, changed)


def test_other_dtypes_keep_their_modules():
    model = packed_model("llama")
    model.model.to(torch.bfloat16)
    assert HFModel(model, probed=True).fusion == Fusion()


def test_a_module_that_computes_something_else_is_kept():
    """The control of the comparison: a norm with a shift, a gate with another activation, scores that are scaled."""
    model = packed_model("llama")
    model.model.norm.forward = lambda x: x + 1
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()
        layer.self_attn.forward = lambda hidden_states, **options: (hidden_states, None)
    assert HFModel(model, probed=True).fusion == Fusion(norms=4)
    assert not any(type(module) is PackedLinear and module.place.part is not None for module in model.modules())


def test_a_module_with_a_hook_is_kept():
    model, calls = packed_model("llama"), []
    for module in (model.model.norm, model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn):
        module.register_forward_hook(lambda *_: calls.append(1))
    served = HFModel(model, probed=True)
    assert served.fusion == Fusion(norms=4, attentions=1, gates=1, layers=1)
    calls.clear()
    passes(served)
    assert len(calls) >= 9
