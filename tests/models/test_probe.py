"""Models that are probed before they are served: quantised ones, unknown families and foreign code."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from torch import nn

from draftproof.core.types import InexactError
from draftproof.models import hf
from draftproof.models.compatibility import TESTED_FAMILIES, check_device, is_quantized
from draftproof.models.encoder_decoder import EncoderDecoder
from draftproof.models.hf import HFModel
from draftproof.models.loading import LoadOptions, as_model, load_model
from draftproof.models.probe import LONGEST_CROSSED, needs_probe
from models.families import CONFIGS, LLAMA, family
from models.reference import TOLERANCE, Rows
from models.test_encoder_decoder import pair

TEXTS = [[5, 9, 4, 8, 3, 7, 7, 20, 31, 12, 6], [11, 12], [3]]
MOVED = r"a later token moves earlier logits by \d+\.\d % of their spread"


class QuantizedLinear(nn.Module):
    """A linear layer that rounds its input to 8 bits, with one scale for each token."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


class OutlierLinear(QuantizedLinear):
    """A linear layer as of LLM.int8: columns with an outlier in any token of the pass are not rounded."""

    def forward(self, x):
        is_outlier = x.flatten(0, -2).abs().amax(0) > 2 * x.std()
        rest = super().forward(x.masked_fill(is_outlier, 0))
        return rest + nn.functional.linear(x.masked_fill(~is_outlier, 0), self.weight)


def quantized(model, linear):
    """Replace the linear layers of the decoder and mark the model as quantised."""
    for parent in list(model.base_model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, linear(child))
    model.config.quantization_config = {"quant_method": "of this test"}
    return model


def test_a_model_whose_quantisation_decides_over_a_whole_pass_is_refused_with_the_number():
    model = quantized(family("llama"), OutlierLinear)
    assert model.config.model_type in TESTED_FAMILIES
    with pytest.raises(InexactError, match=rf"LlamaForCausalLM is not causal: {MOVED}.*load_in_4bit"):
        HFModel(model)


def test_a_model_that_is_quantised_for_each_token_is_served():
    model = quantized(family("llama"), QuantizedLinear)
    served = HFModel(model)
    rows = Rows(served, served.new_cache(3), TEXTS)

    @torch.no_grad()
    def plain(_row, text):
        return model(torch.tensor([text]), use_cache=False).logits[0]

    spread = plain(0, TEXTS[0]).std()
    for accepted in ([0, 4, 2], [4, 0, 1]):
        assert rows.chain_round(4, accepted, plain) < 0.05 * spread


def test_dynamic_quantisation_of_torch_is_refused():
    """It has one activation scale for all tokens of a pass: a real case, without a mark in the configuration."""
    if not hasattr(torch.ao.quantization, "quantize_dynamic") or len(torch.backends.quantized.supported_engines) < 2:
        pytest.skip("this build of torch has no quantised layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        model = torch.ao.quantization.quantize_dynamic(family("llama"), {nn.Linear}, dtype=torch.qint8)
        with pytest.raises(InexactError, match=MOVED):
            HFModel(model)


def test_a_quantised_drafter_may_be_of_any_kind():
    """It draws from the distribution that it computes, whatever that depends on."""
    model = quantized(family("llama"), OutlierLinear)
    assert as_model(model, "drafter").vocab_size == 61
    with pytest.raises(InexactError, match=MOVED):
        as_model(model, "target")


def test_a_quantised_encoder_decoder_is_probed_too():
    model, _ = pair("bart")
    assert EncoderDecoder(quantized(model, QuantizedLinear)).vocab_size > 0
    model, _ = pair("bart")
    with pytest.raises(InexactError, match=MOVED):
        EncoderDecoder(quantized(model, OutlierLinear))


class MovingWeight(nn.Parameter):
    """A weight whose scale is taken over by the module in its first pass, as bitsandbytes' 8-bit weights do it."""

    def __new__(cls, data):
        weight = torch.Tensor._make_subclass(cls, data, False)
        weight.scale = torch.full((len(data), 1), 2.0)
        return weight


class MovingLinear(QuantizedLinear):
    def __init__(self, linear):
        super().__init__(linear)
        self.weight, self.state = MovingWeight(linear.weight.detach() / 2), SimpleNamespace(scale=None)

    def forward(self, x):
        if self.weight.scale is not None:
            self.state.scale, self.weight.scale = self.weight.scale, None
        scale = 1 if self.state.scale is None else self.state.scale
        return nn.functional.linear(x, self.weight * scale, self.bias)


def test_a_quantised_model_still_works_after_it_was_wrapped():
    """State that moves from the weight into the module in the first pass must not be moved into our copy."""
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        right = family("llama")(tokens).logits
        for role in ("target", "drafter"):
            model = quantized(family("llama"), MovingLinear)
            served = as_model(model, role)
            assert torch.allclose(served(tokens, served.new_cache(1)).logits, right, atol=TOLERANCE)
            assert torch.allclose(model(tokens).logits, right, atol=TOLERANCE)
            state = [module.state.scale.data_ptr() for module in model.modules() if isinstance(module, MovingLinear)]
            shared = [module.state.scale.data_ptr() for module in served._net.modules() if hasattr(module, "state")]
            assert state == shared


def marked(name, value):
    def mark(model):
        setattr(model, name, value)

    return mark


def in_config(model):
    model.config.quantization_config = SimpleNamespace(bits=4)


def eight_bits(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


def float8(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight.detach().to(torch.float8_e4m3fn))


def other_linear(model):
    model.model.layers[1].mlp.up_proj = QuantizedLinear(model.model.layers[1].mlp.up_proj)


SIGNS = {
    "configuration": in_config,
    "quantizer": marked("hf_quantizer", SimpleNamespace()),
    "8 bits": marked("is_loaded_in_8bit", True),
    "4 bits": marked("is_loaded_in_4bit", True),
    "int8 weights": eight_bits,
    "float8 weights": float8,
    "another linear layer": other_linear,
}


@pytest.mark.parametrize("sign", SIGNS)
def test_every_sign_of_quantisation_leads_to_a_probe(sign):
    model = family("llama")
    SIGNS[sign](model)
    assert is_quantized(model)
    assert needs_probe(model)
    assert not needs_probe(model, drafter=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_of_the_tests_in_any_precision_needs_none(name, dtype):
    assert not needs_probe(family(name).to(dtype))


def test_a_packed_model_needs_none():
    from draftproof.models.cpu_linear import pack, packable

    model = family("llama")
    if not packable(model):
        pytest.skip("this build of torch cannot pack")
    pack(model)
    assert not needs_probe(model)


# --- unknown families and foreign code


def test_a_family_that_is_not_in_our_tests_is_probed_and_served_if_it_agrees():
    model = tf.StableLmForCausalLM(tf.StableLmConfig(**LLAMA)).eval()
    assert model.config.model_type not in TESTED_FAMILIES
    assert needs_probe(model)
    assert needs_probe(model, drafter=True)
    served = HFModel(model)
    rows = Rows(served, served.new_cache(3), TEXTS)
    assert rows.chain_round(3, [0, 1, 2], lambda _, text: model(torch.tensor([text])).logits[0].detach()) < TOLERANCE


class Forgetful(tf.LlamaForCausalLM):
    """A model that ignores its positions, which a probe must find."""

    def forward(self, input_ids=None, position_ids=None, **inputs):
        return super().forward(input_ids, **inputs)


def test_a_model_that_answers_differently_in_a_batch_is_refused():
    config = tf.LlamaConfig(**LLAMA, initializer_range=0.3)
    config.model_type = "forgetful"
    with pytest.raises(InexactError, match="gives other logits in a ragged batch or a tree than alone"):
        HFModel(Forgetful._from_config(config, attn_implementation="sdpa").eval())


def test_foreign_code_under_the_name_of_a_known_family_is_probed():
    config = tf.LlamaConfig(**LLAMA, initializer_range=0.3)
    assert config.model_type in TESTED_FAMILIES
    with pytest.raises(InexactError, match="gives other logits in a ragged batch or a tree than alone"):
        HFModel(Forgetful._from_config(config, attn_implementation="sdpa").eval())


class Reverse(tf.LlamaForCausalLM):
    """A model in which every token is moved a little by the last one."""

    def forward(self, input_ids=None, **inputs):
        out = super().forward(input_ids, **inputs)
        out.logits = out.logits * (1 + 1e-2 * (input_ids[:, -1:, None] % 2))
        return out


def test_a_model_that_looks_ahead_is_refused_without_a_word_on_quantisation():
    config = tf.LlamaConfig(**LLAMA, initializer_range=0.3)
    with pytest.raises(InexactError, match=rf"Reverse is not causal: {MOVED}.*transformers' own generate"):
        HFModel(Reverse._from_config(config).eval())


def test_the_first_layers_of_a_probed_model_are_not_probed_again(monkeypatch):
    served = HFModel(tf.StableLmForCausalLM(tf.StableLmConfig(**LLAMA)).eval())
    monkeypatch.setattr(hf, "probe", lambda *given, **more: pytest.fail("probed"))
    assert served.first_layers(2) is served.first_layers(2)


# --- attention windows


class Shortsighted(tf.MistralForCausalLM):
    """A model whose own window is one token shorter than its configuration says."""

    def forward(self, input_ids=None, attention_mask=None, **inputs):
        if attention_mask is None:
            at = torch.arange(input_ids.shape[1])
            ago = at[:, None] - at
            attention_mask = ((ago >= 0) & (ago < self.config.sliding_window - 1))[None, None]
        return super().forward(input_ids, attention_mask=attention_mask, **inputs)


def windowed(model, window, max_length=1024):
    config = tf.MistralConfig(**{**LLAMA, "max_position_embeddings": max_length}, sliding_window=window)
    config.initializer_range = 0.3
    config.model_type = "windowed"
    torch.manual_seed(0)
    return model._from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("window", [20, 100])
def test_a_probe_crosses_the_attention_window(window):
    assert HFModel(windowed(tf.MistralForCausalLM, window)).vocab_size == 61
    with pytest.raises(InexactError, match="gives other logits in a ragged batch or a tree than alone"):
        HFModel(windowed(Shortsighted, window))


def test_a_window_too_long_to_cross_is_named():
    with pytest.warns(UserWarning, match=f"within its attention window of {LONGEST_CROSSED + 1}: longer texts are not"):
        HFModel(windowed(tf.MistralForCausalLM, LONGEST_CROSSED + 1))


def test_a_window_as_long_as_the_model_needs_no_crossing():
    assert HFModel(windowed(tf.MistralForCausalLM, 128, max_length=128)).max_length == 128


# --- devices


def spread(model):
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": "cuda:0", "lm_head": "cpu"}


def offloaded(model):
    model.hf_device_map = {"": "cpu"}
    next(model.children())._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(), SimpleNamespace(offload=True)))


def half_moved(model):
    model.lm_head.to("meta")


PLACED = {
    "several devices": (spread, r"spread over several devices \(hf_device_map names cpu, cuda:0\).*device_map="),
    "offloading": (offloaded, r"weights that accelerate loads for each pass \(hf_device_map=\{'': 'cpu'\}\)"),
    "a part elsewhere": (half_moved, r"has weights on cpu, meta: move it to one device"),
    "another device": (lambda model: model.to("meta"), r"is on 'meta', and models are served only on cpu and cuda"),
}


@pytest.mark.parametrize("case", PLACED)
@pytest.mark.parametrize("wrap", [HFModel, EncoderDecoder])
def test_a_model_that_is_not_on_one_known_device_is_refused(case, wrap):
    place, message = PLACED[case]
    model = family("llama") if wrap is HFModel else pair("bart")[0]
    place(model)
    with pytest.raises(ValueError, match=message):
        wrap(model)


def test_a_device_map_of_one_device_is_served():
    model = family("llama")
    model.hf_device_map = {"": "cpu"}
    assert HFModel(model).device == torch.device("cpu")


def test_mps_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="device='mps' is on 'mps', and models are served only on cpu and cuda"):
        load_model("nowhere", LoadOptions(device="mps"))
    with pytest.raises(ValueError, match="xpu:1"):
        check_device(torch.device("xpu:1"), "it")
