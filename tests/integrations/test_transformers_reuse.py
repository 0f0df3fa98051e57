"""Calls of custom_generate after the first: nothing is prepared again, unless the model has changed."""

import gc
from collections import Counter
from weakref import ref

import pytest
import torch
import transformers as tf
from torch import nn

import draftproof as dp
from draftproof.integrations import transformers as integration
from draftproof.models import hf
from draftproof.models.head import file as headfile
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from models.families import LLAMA, V, family

IDS = torch.tensor([[5, 9, 4, 8, 5, 9]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def ours(model, drafter="ngram", **options):
    return model.generate(IDS, custom_generate=dp.transformers.generate, drafter=drafter, **{**GREEDY, **options})


def assert_as_plain(model, drafter="ngram"):
    assert torch.equal(ours(model, drafter, num_draft_tokens=3), model.generate(IDS, **GREEDY))


@pytest.fixture
def made(monkeypatch):
    """Count what is prepared, by name."""
    counts = Counter()

    def count(module, name):
        original = getattr(module, name)

        def counted(*given, **more):
            counts[name] += 1
            return original(*given, **more)

        monkeypatch.setattr(module, name, counted)

    for name in ("copy_for_slot_cache", "copy_first_layers", "probe"):
        count(hf, name)
    count(headfile, "load")
    count(integration, "load_model")
    return counts


def unlisted():
    torch.manual_seed(0)
    return tf.StableLmForCausalLM(tf.StableLmConfig(**LLAMA, initializer_range=0.3)).eval()


def head_folder(model, tmp_path):
    meta = headfile.meta_for(model, tuple(range(V)), target="tiny", training={}, licence="")
    headfile.save(tmp_path / "head", Head(shape_for(model)), meta)
    return f"head:{tmp_path / 'head'}"


DRAFTERS = {
    "ngram": (lambda model, folder: "ngram", {"copy_for_slot_cache": 1, "probe": 1}),
    "layers": (
        lambda model, folder: "early-exit:1",
        {"copy_for_slot_cache": 2, "copy_first_layers": 1, "probe": 1},
    ),
    "head": (head_folder, {"copy_for_slot_cache": 1, "probe": 1, "load": 1}),
    "model": (lambda model, folder: family("llama"), {"copy_for_slot_cache": 2, "probe": 1}),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_second_call_copies_reads_and_probes_nothing(made, drafter, tmp_path):
    model, (make, wanted) = unlisted(), DRAFTERS[drafter]
    spec = make(model, tmp_path)
    assert_as_plain(model, spec)
    assert made == wanted
    for _ in range(3):
        assert_as_plain(model, spec)
    assert made == wanted


def test_a_draft_model_is_loaded_by_name_once(made, monkeypatch):
    monkeypatch.setattr(integration, "load_model", lambda name, options: (made.update([name]), (family(name), None))[1])
    model = family("llama")
    for _ in range(3):
        assert_as_plain(model, "qwen2")
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert_as_plain(model, "qwen2")
    assert made["qwen2"] == 1
    assert_as_plain(model, "phi")
    assert made["phi"] == 1


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that can be switched off."""

    def __init__(self, base):
        super().__init__()
        self.base, self.enabled = base, True
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.down.weight)
        nn.init.normal_(self.up.weight)

    def forward(self, x):
        return self.base(x) + (self.up(self.down(x)) if self.enabled else 0)


def in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        model.model.layers[1].mlp.up_proj.weight.neg_()


def assigned(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()}, assign=True)


def one_parameter(model):
    proj = model.model.layers[1].mlp.down_proj
    proj.weight = nn.Parameter(-proj.weight.detach())


def adapted(model):
    model.model.layers[1].mlp.up_proj = Adapter(model.model.layers[1].mlp.up_proj)


CHANGES = {
    "in place": in_place,
    "assigned": assigned,
    "one parameter": one_parameter,
    "precision": lambda model: model.to(torch.bfloat16),
    "double precision": lambda model: model.double(),
    "an adapter": adapted,
}


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:2"])
@pytest.mark.parametrize("change", CHANGES)
def test_texts_are_right_after_the_model_has_changed(change, drafter):
    torch.manual_seed(0)
    model = family("llama")
    before = ours(model, drafter)
    CHANGES[change](model)
    assert_as_plain(model, drafter)
    if "precision" not in change:
        assert not torch.equal(before, ours(model, drafter))


def test_an_adapter_can_be_switched_off_and_on():
    torch.manual_seed(0)
    model = family("llama")
    plain = ours(model)
    adapted(model)
    with_adapter = ours(model)
    model.model.layers[1].mlp.up_proj.enabled = False
    assert torch.equal(ours(model), plain)
    model.model.layers[1].mlp.up_proj.enabled = True
    assert torch.equal(ours(model), with_adapter)
    assert not torch.equal(plain, with_adapter)


def test_a_head_is_fitted_again_after_the_weights_changed(made, tmp_path):
    model = family("llama")
    spec = head_folder(model, tmp_path)
    assert_as_plain(model, spec)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # the signs, by which a head knows its target, stay
    assert_as_plain(model, spec)
    assert made["load"] == 2
    head_folder(model, tmp_path)  # trained anew
    assert_as_plain(model, spec)
    assert made["load"] == 3


def test_a_sampled_text_does_not_depend_on_earlier_calls():
    """Drafters that learn from earlier texts are made for each call."""
    model = family("llama")
    one = ours(model, "suffix", do_sample=True, seed=1)
    for seed in (2, 3):
        ours(model, "suffix", do_sample=True, seed=seed)
    assert torch.equal(one, ours(model, "suffix", do_sample=True, seed=1))


def test_nothing_outlives_the_model(tmp_path):
    model = family("llama")
    spec = head_folder(model, tmp_path)
    for drafter in (spec, "early-exit:1", "ngram"):
        ours(model, drafter)
    alive = [ref(model), ref(model.lm_head.weight), ref(hf_copy(model))]
    del model
    gc.collect()
    assert [found() for found in alive] == [None] * 3


def hf_copy(model):
    return integration.as_model(model)._net
