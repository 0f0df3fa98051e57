"""Fused layers give the logits of the modules they replace, over a pool, on a GPU or in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from budget import budgeted
from draftproof.core import device as core_device
from draftproof.models.device_pass import DevicePool
from draftproof.models.fused import Fusion, lay_side_by_side
from draftproof.models.fused_norm import FusedNorm
from draftproof.models.hf import HFModel
from draftproof.models.packed import Span
from draftproof.models.pool import KVPool

pytest.importorskip("triton")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": Fusion(norms=5, attentions=2, gates=2, layers=2, rotary=True),
    "qwen2": Fusion(norms=5, attentions=2, gates=2, layers=2, rotary=True),
    "qwen3": Fusion(norms=9, attentions=2, gates=2, layers=2, rotary=True),
    "mistral": Fusion(norms=5, attentions=2, gates=2, layers=2, rotary=True),
    "olmo2": Fusion(norms=9, attentions=2, gates=2, layers=2, rotary=True),
    "exaone4": Fusion(norms=9, attentions=2, gates=2, layers=2, rotary=True),
    "phi3": Fusion(norms=5, attentions=2, gates=2, layers=2, rotary=True),
    "granite": Fusion(norms=5, attentions=2, gates=2, layers=2, rotary=True),
    "mixtral": Fusion(norms=5, attentions=2, layers=2, rotary=True),
    "gemma2": Fusion(norms=9, attentions=2, gates=2, layers=2, rotary=True),
    "gemma3_text": Fusion(norms=13, attentions=2, gates=2, layers=2, rotary=True),
    "gpt_neox": Fusion(),
}
"""What is replaced. OLMo 2 norms all heads at once and, like EXAONE 4, what attention and MLP return; Phi-3's weights
are merged already; Granite scales what it adds; Mixtral's experts are kept as they are."""

MORE = {"granite": {"residual_multiplier": 0.22}, "phi3": {"partial_rotary_factor": 0.5}}
MERGED_WEIGHTS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(core_device, "HOST", "none")
        monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cpu",))


def tiny(family, device, dtype=torch.float32):
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **SIZES, **MORE.get(family, {}))
    model = AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight))
    return model


def passes(model, fused, device):
    """Return the logits of two rows of 3 tokens, then of 2 more tokens in the first and 1 in the second."""
    served = HFModel(model, graphs=False, probed=True, fused=fused)
    pool = KVPool(served.kv_shapes(), 4, torch.device(device), spare=1)
    for buffer in (*pool.keys, *pool.values):
        buffer.fill_(torch.nan)
    where = DevicePool(pool.keys, pool.values, 4 * 64, 128)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]], device=device)
    first = served.device_pass(tokens, torch.tensor([[0, 64], [0, 0], [3, 3]], device=device), where).logits
    more = torch.tensor([[9, 10], [11, 0]], device=device)
    second = served.device_pass(more, torch.tensor([[0, 64], [3, 3], [2, 1]], device=device), where).logits
    return served, torch.cat([first[0], first[1], second[0], second[1, :1]])


@pytest.mark.parametrize("family", budgeted(list(FAMILIES), ["llama", "gpt_neox"]))
def test_the_logits_are_those_of_the_modules(family, device):
    model = tiny(family, device)
    served, logits = passes(model, True, device)
    found = served.fusion
    wanted = FAMILIES[family]
    assert replace(found, bytes=0) == wanted
    texts = ([3, 4, 5, 9, 10], [6, 7, 8, 11])
    one, other = (model(torch.tensor([text], device=device)).logits[0] for text in texts)
    plain = torch.cat([one[:3], other[:3], one[3:], other[3:]])
    assert (logits - plain).abs().max() < 1e-4 * plain.abs().max()
    _, apart = passes(model, False, device)
    assert (apart - plain).abs().max() < 1e-4 * plain.abs().max()


@pytest.mark.parametrize("family", budgeted(["llama", "qwen3", "gemma2", "gemma3_text"], ["gemma2"]))
def test_prompts_are_read_by_fused_layers_too(family, device, monkeypatch):
    """In a packed pass, as on a CPU; the modules that were replaced are not called."""
    model = tiny(family, device)
    texts = ([3, 4, 5, 9, 10], [6, 7, 8])
    served = HFModel(model, graphs=False, probed=True)
    pool = KVPool(served.kv_shapes(), 4, torch.device(device), spare=1)
    this = served.packed_pass(torch.tensor([*texts[0], *texts[1]], device=device), [Span(0, 0, 5), Span(64, 0, 3)])
    for layer in served._net.model.layers:
        monkeypatch.setattr(type(layer.self_attn.original), "forward", None)
    logits, _ = served.packed(this, pool.keys, pool.values, scored=8)
    monkeypatch.undo()
    plain = torch.cat([model(torch.tensor([text], device=device)).logits[0] for text in texts])
    assert (logits - plain).abs().max() < 1e-4 * plain.abs().max()


@pytest.mark.parametrize("family", ["granite", "olmo2"])
def test_a_layer_that_adds_something_else_is_kept(family, device, monkeypatch):
    """Control: a layer with the right parts whose result is another."""
    model = tiny(family, device)
    kind = type(model.model.layers[0])
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **options: right(*args, **options) * 1.02)
    served, logits = passes(model, True, device)
    assert (served.fusion.attentions, served.fusion.layers) == (2, 0)
    _, apart = passes(model, False, device)
    assert (logits - apart).abs().max() < 1e-4 * apart.abs().max()


def test_an_attention_that_uses_positions_for_more_than_rotating_is_kept(device, monkeypatch):
    """Control: a scale that is 1 for early positions, as in Llama 4."""
    model = tiny("llama", device)
    kind = type(model.model.layers[0].self_attn)
    right = kind.forward

    def scaled(self, hidden_states, position_ids=None, **options):
        late = 1.0 if position_ids is None else 1 + 0.1 * (position_ids >= 8192)[..., None]
        return right(self, hidden_states * late, **options)

    monkeypatch.setattr(kind, "forward", scaled)
    assert HFModel(model, graphs=False, probed=True).fusion.attentions == 0


def test_a_norm_computed_with_its_sum_is_given_once_and_for_that_sum_alone(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the interpreter rounds bfloat16 in another way
    norm = FusedNorm.of(tiny("llama", device, dtype).model.norm)
    x, added = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    total = norm.sum(x, added)
    assert torch.equal(total, x + added)
    assert torch.equal(norm(x), norm.step(x, norm.weight, norm.variance_epsilon))  # another tensor
    assert norm.ready is None
    assert torch.equal(norm(norm.sum(x, added)), norm.step(total, norm.weight, norm.variance_epsilon))
    assert norm.ready is None


def test_the_model_passed_in_is_unchanged(device, tmp_path):
    model = tiny("llama", device)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    HFModel(model, graphs=False, probed=True)
    assert [type(module) for module in model.modules()] == kinds
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight.to(device), before[name]) for name, weight in again.state_dict().items())


def test_weights_side_by_side_are_merged_without_a_copy(device):
    model = tiny("qwen2", device)  # with biases, which are copied
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    copied = HFModel(model, graphs=False, probed=True).fusion.bytes
    merged = [weight for name, weight in before.items() if name.endswith(MERGED_WEIGHTS)]
    assert copied == sum(weight.nbytes for weight in merged)
    lay_side_by_side(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    served, logits = passes(model, True, device)
    assert replace(served.fusion, bytes=0) == FAMILIES["qwen2"]
    assert served.fusion.bytes == 0
    _, apart = passes(model, False, device)
    assert (logits - apart).abs().max() < 1e-4 * apart.abs().max()


def test_a_module_that_computes_something_else_is_kept(device):
    """The control of the comparison: a norm with a shift, a gate with another activation, scores that are scaled."""
    model = tiny("llama", device)
    model.model.norm.forward = lambda x: x + 1
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()
        layer.self_attn.forward = lambda hidden_states, **options: (hidden_states, None)
    found = HFModel(model, graphs=False, probed=True).fusion
    assert (found.norms, found.attentions, found.gates) == (4, 0, 0)
