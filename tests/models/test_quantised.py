"""Quantised weights are for models that draftproof loads; a refusal leaves float32, and a user's object stays as is."""

import json
import subprocess
import warnings

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.models import bundled, cpu_support, loading
from draftproof.models.head.taps import weights_hash
from draftproof.models.int4_linear import Int4Linear, unpack
from draftproof.models.int8_linear import Int8Linear
from draftproof.models.quantised import quantise
from models.int4_models import float_llama, needs_int4
from models.tiny_tokenizers import byte_level


@pytest.fixture
def folder(tmp_path):
    float_llama(50).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _some_tokenizer(monkeypatch):
    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", lambda *_args, **_options: byte_level())


@needs_int4
def test_layers_get_four_bits_the_output_eight_and_errors_are_reported():
    model = float_llama(50)
    before, known = model.model.layers[0].self_attn.q_proj.weight.detach().clone(), weights_hash(model)
    found = quantise(model, "int4")
    assert type(model.model.layers[1].mlp.down_proj) is Int4Linear
    assert type(model.lm_head) is Int8Linear
    assert weights_hash(model) == known  # heads trained on the model still know it
    made = unpack(model.model.layers[0].self_attn.q_proj.int4)
    relative = float((made - before).norm() / before.norm())
    assert found.layers["model.layers.0.self_attn.q_proj"] == pytest.approx(relative, rel=1e-4)
    assert 0.03 < found.mean < found.worst < 0.12
    assert found.layers["lm_head"] < 0.01


@needs_int4
def test_a_folder_is_quantised_and_an_object_is_not(folder):
    four = dp.load(str(folder), None, weights="int4")
    assert type(four.hf.model.layers[0].mlp.up_proj) is Int4Linear
    assert 0 < four.hf.quantisation_error.worst < 0.12
    eight = dp.load(str(folder), None, weights="int8")
    assert type(eight.hf.model.layers[0].mlp.up_proj) is Int8Linear
    assert eight.hf.quantisation_error.worst < 0.01
    own = float_llama(50)
    dp.load(own, None, weights="int4")
    assert type(own.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not any(isinstance(module, Int4Linear) for module in dp.load(str(folder), None).hf.modules())


@needs_int4
def test_eight_bits_are_near_the_models_own_logits_and_four_bits_nearer_than_nothing(folder):
    tokens = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = float_llama(50)(tokens).logits
        eight, four = (dp.load(str(folder), None, weights=kind).hf(tokens).logits for kind in ("int8", "int4"))
    assert float((eight - own).norm() / own.norm()) < 0.03
    assert float((four - own).norm() / own.norm()) < 0.4


def test_a_wrong_name_is_refused(folder):
    with pytest.raises(ValueError, match="weights must be one of auto, float32, int4, int8; got 'int3'"):
        dp.load(str(folder), None, weights="int3")


def test_a_cpu_that_cannot_gets_float32_with_a_sentence(folder, monkeypatch):
    monkeypatch.setattr(cpu_support, "int4_refusal", lambda: "this CPU has no AVX-512")
    with pytest.warns(UserWarning, match="weights='int4' are not used: this CPU has no AVX-512"):
        engine = dp.load(str(folder), None, weights="int4")
    assert not any(isinstance(module, Int4Linear) for module in engine.hf.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen("auto") == "float32"


def chosen(weights, name=bundled.NAME, device="cpu", **options):
    return loading.chosen_weights(name, loading.LoadOptions(weights=weights, **options), torch.device(device))


def test_auto_is_what_the_bundled_file_holds(monkeypatch):
    monkeypatch.setattr(cpu_support, "int4_refusal", lambda: None)
    assert [chosen(kind) for kind in ("auto", "float32", "int4", "int8")] == ["int4", "float32", "int4", "int8"]
    assert chosen("auto", name="another/model") == "float32"
    assert chosen("auto", device="cuda") == "float32"
    assert chosen("auto", dtype=torch.float32) == chosen("auto", pack=False) == "float32"


def test_a_cpu_is_tried_in_a_child_once(monkeypatch, tmp_path):
    """A child that crashes is a refusal; the answer is remembered, and not asked for again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = []

    def crashing(*_args, **_options):
        ran.append(1)
        return subprocess.CompletedProcess([], -4)

    monkeypatch.setattr(subprocess, "run", crashing)
    assert not cpu_support._works()
    assert not cpu_support._works()
    assert len(ran) == 1
    [remembered] = (tmp_path / "draftproof").glob("int4-*.json")
    assert json.loads(remembered.read_text())["works"] is False
    remembered.write_text("{")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: subprocess.CompletedProcess([], 0))
    assert cpu_support._works()


@needs_int4
def test_the_probe_passes_where_the_tests_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_support._works()


@needs_int4
@pytest.mark.slow
def test_the_bundled_model_has_the_weights_of_its_file(smollm2):
    """Matrices equal the float32 conversion up to the rounding of scales and zeros; other row orders would not."""
    own, _ = smollm2
    model, _ = bundled.load(weights="int4")
    assert weights_hash(model) == weights_hash(own)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        made = unpack(model.model.layers[17].get_submodule(name).int4)
        expected = own.model.layers[17].get_submodule(name).weight.detach()
        assert float((made - expected).norm() / expected.norm()) < 2**-8
    assert torch.equal(model.model.embed_tokens.weight, own.model.embed_tokens.weight.bfloat16())
