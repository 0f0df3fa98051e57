"""The bundled model is run without transformers, and computes what transformers' model of the same weights does."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import draftproof as dp
from draftproof.models.head.taps import shape_for, weights_hash
from draftproof.models.int4_linear import Int4Linear
from draftproof.models.llama import Llama, LlamaConfig
from draftproof.models.llama_model import LlamaModel
from draftproof.models.loading import as_model
from draftproof.models.quantised import llama_from_gguf
from models.gguf_llama import LAYERS, V, write_llama
from models.int4_models import needs_int4
from models.tiny_tokenizers import byte_level

pytestmark = needs_int4


def read(folder):
    return llama_from_gguf(folder / "model.gguf", LlamaConfig.read(folder / "config.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return read(folder)


WITHOUT = """
import sys
from pathlib import Path
import draftproof as dp
from draftproof.models.llama import LlamaConfig
from draftproof.models.quantised import llama_from_gguf
from draftproof.models.tokenizer_file import FileTokenizer
folder = Path(sys.argv[1])
model = llama_from_gguf(folder / "model.gguf", LlamaConfig.read(folder / "config.json"))
for drafter in (None, "ngram", "early-exit:1"):
    engine = dp.load(model, drafter, tokenizer=FileTokenizer(folder))
    assert len(engine.generate("the quick fox", max_tokens=5, ignore_eos=True).tokens) == 5
found = {"transformers", "torch._dynamo", "sympy"} & set(sys.modules)
sys.exit(f"imported: {found}" if found else 0)
"""


def test_a_text_is_generated_without_importing_transformers(folder):
    done = subprocess.run([sys.executable, "-c", WITHOUT, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_logits_and_states_are_those_of_transformers(model):
    tokens = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(3))
    served = as_model(model)
    assert isinstance(served, LlamaModel)
    made = served(tokens, served.new_cache(1, 12), layers=(1, LAYERS))
    with torch.no_grad():
        expected = model.as_transformers()(tokens, use_cache=False, output_hidden_states=True)
    states = expected.hidden_states
    for ours, theirs in ((made.logits, expected.logits), (made.hidden[0], states[1]), (made.hidden[1], states[-1])):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02
    other = model.as_transformers()(tokens.flip(1), use_cache=False).logits
    assert float((made.logits - other).norm() / other.norm()) > 0.2


def test_the_transformers_model_has_the_same_weights_and_is_made_once(model):
    theirs = model.as_transformers()
    assert theirs is model.as_transformers()
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            assert theirs.get_submodule(name) is module
    assert theirs.model.layers[1].mlp.gate_proj is model.model.layers[1].mlp.gate_proj
    assert theirs.model.norm.weight is model.model.norm.weight
    assert not [name for name, weight in theirs.named_parameters() if weight.is_meta]
    assert weights_hash(theirs) == weights_hash(model)
    assert theirs.config.num_hidden_layers == LAYERS
    assert shape_for(theirs) == shape_for(model)  # a head trained on either has the same sizes


def test_frequencies_have_the_bits_of_transformers(model):
    config = model.as_transformers().config
    assert torch.equal(model.model.rotary_emb.inv_freq, LlamaRotaryEmbedding(config).inv_freq)


def test_an_engine_shows_the_target_as_a_transformers_model(model):
    engine = dp.load(model, None)
    assert engine.loaded is model
    assert type(engine.hf).__name__ == "LlamaForCausalLM"
    again = dp.load(engine.hf, None)
    assert isinstance(again.model, LlamaModel)
    greedy = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    assert again.generate([5, 6, 7], **greedy).tokens == engine.generate([5, 6, 7], **greedy).tokens
    beams = dp.load(model, None, tokenizer=byte_level()).generate([5, 6, 7], max_tokens=4, num_beams=2)
    assert len(beams.tokens) == 4
    with pytest.raises(NotImplementedError, match=r"only holds weights: call as_transformers\(\)"):
        model(torch.tensor([[1]]))


def test_a_model_is_dropped_with_its_last_reference(folder):
    mine = read(folder)
    served, theirs, gone = as_model(mine), mine.as_transformers(), weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None
    assert served.vocab_size == theirs.config.vocab_size


def test_another_familys_model_is_no_llama():
    assert Llama.of(torch.nn.Linear(2, 2)) is None


def test_a_damaged_file_is_refused_or_is_a_model_of_the_same_shapes(folder, tmp_path):
    """Flip bytes of the header: a `ValueError` comes, or a model that runs."""
    config, path = LlamaConfig.read(folder / "config.json"), tmp_path / "model.gguf"
    whole, rng, refused = (folder / "model.gguf").read_bytes(), np.random.default_rng(2), 0
    header = whole.index(b"blk.0.ffn_norm")
    for _ in range(80):
        content = bytearray(whole)
        content[rng.integers(4, header)] = rng.integers(256)
        path.write_bytes(content)
        try:
            served = as_model(llama_from_gguf(path, config))
        except ValueError:
            refused += 1
            continue
        assert served(torch.tensor([[1, 2]]), served.new_cache(1, 2)).logits.shape == (1, 2, V)
    assert refused > 40


def test_another_shape_is_named(folder):
    config = LlamaConfig.read(folder / "config.json")
    config.intermediate_size = 64
    with pytest.raises(ValueError, match=r"ffn_gate.weight has shape \(128, 64\), and the configuration gives it \(64"):
        llama_from_gguf(folder / "model.gguf", config)
