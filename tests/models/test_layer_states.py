"""Hidden states taken out of a pass: those that transformers collects, without keeping the other layers' states."""

from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
import transformers as tf

from draftproof.models.hf import HFModel
from models.families import CONFIGS, LLAMA, family
from models.reference import Rows

TEXTS = [[5, 9, 4, 8, 3, 7, 7, 20, 31, 12, 6], [11, 12]]
PARENTS = [-1, 0, 0]


def passes(served, layers):
    """Return the results of a prefill, a ragged chain and a tree."""
    rows = Rows(served, served.new_cache(2), TEXTS)
    tokens = torch.tensor([[text[-1], 4, 5, 6] for text in TEXTS])
    tree = torch.tensor([PARENTS] * 2)
    return [
        served(torch.tensor([TEXTS[0]]), served.new_cache(1), scored=1, layers=layers),
        served(tokens, rows.cache, layers=layers),
        served(tokens, rows.cache, parents=tree, layers=layers),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_logits_are_exactly_those_that_transformers_collects(name):
    served = HFModel(family(name))
    layers = tuple(range(served._config.num_hidden_layers, 0, -1))
    ours = passes(served, layers)
    served._states = None  # transformers collects those of all layers
    for mine, whole in zip(ours, passes(served, layers), strict=True):
        assert torch.equal(mine.logits, whole.logits)
        assert len(mine.hidden) == len(layers)
        assert all(map(torch.equal, mine.hidden, whole.hidden))


def deep_model():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, "num_hidden_layers": 12})).eval()


def most_alive(served):
    """Return the most layer outputs that were alive at once during a pass with three taps."""
    outputs, most = [], 0

    def watch(module, inputs, output):
        nonlocal most
        outputs.append(ref(output if isinstance(output, torch.Tensor) else output[0]))
        most = max(most, sum(alive() is not None for alive in outputs))

    assert served.kv_shapes(), "a pass over one token, made once"
    for layer in served._net.model.layers:
        layer.register_forward_hook(watch)
    with torch.inference_mode():
        served(torch.tensor([TEXTS[0]]), served.new_cache(1), scored=1, layers=(3, 7, 12))
    assert len(outputs) == 12
    return most


def test_a_pass_keeps_the_states_of_the_taps_alone():
    """Besides the taps there are a layer's input and its output. All 12 is the control, as transformers keeps them."""
    assert most_alive(HFModel(deep_model())) <= 2 + 2
    whole = HFModel(deep_model())
    whole._states = None
    assert most_alive(whole) == 12


def test_transformers_is_not_asked_for_hidden_states():
    served = HFModel(deep_model())
    asked = []
    served._net.register_forward_pre_hook(lambda module, args, kwargs: asked.append(kwargs), with_kwargs=True)
    passes(served, (3, 7, 12))
    assert {call.get("output_hidden_states", False) for call in asked} == {False}
    hooks = [len(layer._forward_hooks) for layer in served._net.model.layers]
    assert [layer for layer, count in enumerate(hooks, 1) if count] == [3, 7]  # the last is taken after the norm


def test_the_first_layers_end_after_the_norm_though_the_whole_model_was_tapped_there():
    served = HFModel(deep_model())
    passes(served, (1, 2, 12))
    part = served.first_layers(2)
    ours = passes(part, (1, 2))
    part._states = None
    for mine, whole in zip(ours, passes(part, (1, 2)), strict=True):
        assert all(map(torch.equal, mine.hidden, whole.hidden))


def test_threads_that_share_a_model_get_their_own_states():
    served = HFModel(deep_model())
    cases = [((2, 5), [5, 9, 4]), ((5, 2, 12), [8, 3]), ((12,), [7, 7, 20, 31])] * 8

    def run(layers, text):
        return served(torch.tensor([text]), served.new_cache(1), layers=layers).hidden

    alone = [run(*case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: run(*case), cases))
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_layer_that_is_never_called_is_named():
    served = HFModel(deep_model())
    served._net.model.layers[4].forward = None
    served._net.model.layers = served._net.model.layers[:3] + served._net.model.layers[5:]
    with pytest.raises(ValueError, match=r"layer 5 of this model \(LlamaDecoderLayer\) was not called"):
        served(torch.tensor([[5, 6]]), served.new_cache(1), layers=(5,))
