"""A model's fingerprint changes with everything that a structural copy does not follow, and with nothing else."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn

from draftproof.models.fingerprint import PerModel, fingerprint, weights_version
from draftproof.models.loading import as_model
from models.families import CONFIGS, family
from models.test_encoder_decoder import pair


class Adapter(nn.Module):
    """A linear layer and an addition to it that can be switched off."""

    def __init__(self, base):
        super().__init__()
        self.base, self.enabled, self.scaling = base, True, {"default": 2.0}
        self.extra = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + (self.extra(x) * self.scaling["default"] if self.enabled else 0)


def up(model):
    return model.model.layers[1].mlp.up_proj


def adapted(model):
    model.model.layers[1].mlp.up_proj = Adapter(up(model))


def replaced_weight(model):
    up(model).weight = nn.Parameter(up(model).weight.detach().clone())


def other_storage(model):
    up(model).weight.data = up(model).weight.data.clone()


def replaced_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def hooked(model):
    up(model).register_forward_hook(lambda module, inputs, output: output * 2)


def assigned(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def reconfigured(model):
    model.config.rope_parameters["rope_theta"] = 5.0


CHANGES = {
    "a new module": adapted,
    "a replaced parameter": replaced_weight,
    "another storage": other_storage,
    "a replaced buffer": replaced_buffer,
    "assigned weights": assigned,
    "precision": lambda model: model.to(torch.bfloat16),
    "training mode": lambda model: model.train(),
    "a part in training mode": lambda model: up(model).train(),
    "a hook": hooked,
    "an attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.1),
    "the configuration": reconfigured,
    "the attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_copy_does_not_follow_changes_the_fingerprint(change):
    model = family("llama")
    before = fingerprint(model)
    assert before == fingerprint(model)
    CHANGES[change](model)
    assert before != fingerprint(model)


def test_an_adapter_that_is_switched_off_or_scaled_changes_it():
    model = family("llama")
    adapted(model)
    before = fingerprint(model)
    up(model).enabled = False
    off = fingerprint(model)
    up(model).enabled = True
    assert fingerprint(model) == before != off
    up(model).scaling["default"] = 1.0
    assert fingerprint(model) != before


def test_weights_that_change_in_place_do_not_change_it():
    """A copy follows them. What copies their values looks at their version."""
    model = family("llama")
    before, version = fingerprint(model), weights_version(model)
    with torch.no_grad():
        up(model).weight.mul_(2)
    assert fingerprint(model) == before
    assert weights_version(model) > version


@pytest.mark.parametrize("name", CONFIGS)
def test_using_a_model_does_not_change_it(name):
    model = family(name)
    served = as_model(model)
    served(torch.tensor([[5, 6, 7]]), served.new_cache(1), layers=(1,))
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert as_model(model) is served


def test_each_kind_of_wrapper_is_made_once():
    model = family("llama")
    assert as_model(model) is as_model(model)
    assert as_model(model, "drafter") is as_model(model, "drafter")
    assert as_model(model, "drafter") is not as_model(model)
    assert as_model(model, graphs=False) is as_model(model, graphs=False)
    assert as_model(model, graphs=False).graph_cache.refusal is not None
    assert as_model(model).graph_cache.refusal is None
    with_encoder, _ = pair("t5")
    assert as_model(with_encoder) is as_model(with_encoder)


def test_training_mode_is_refused_though_a_wrapper_exists():
    model = family("llama")
    as_model(model)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        as_model(model.train())


def test_a_model_and_what_was_made_of_it_are_dropped_together():
    model = family("llama")
    served = as_model(model)
    served.first_layers(1)
    alive = [ref(model), ref(served), ref(up(model).weight)]
    del model, served
    gc.collect()
    assert [found() for found in alive] == [None] * 3


def test_a_value_is_made_again_for_another_key_and_one_is_kept():
    cache, model, made = PerModel(), nn.Linear(1, 1), []
    for key in (1, 1, 2, 2, 1):
        cache.get(model, "it", key, lambda key=key: made.append(key))
    assert made == [1, 2, 1]
