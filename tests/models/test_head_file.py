"""The file of a head: it is read as written, and refused on any target but its own."""

import copy
import json

import pytest
import torch
import transformers as tf

from draftproof.models.cpu_linear import pack
from draftproof.models.head import file as headfile
from draftproof.models.head.attach import SHIPPED
from draftproof.models.head.network import Head
from draftproof.models.head.taps import default_taps, embeddings, output_rows, shape_for, weights_hash
from draftproof.models.hf import HFModel
from models.families import CONFIGS, V, family

IDS = (7, 3, 20, 11)


def metadata(model: tf.PreTrainedModel) -> headfile.HeadMeta:
    return headfile.meta_for(model, IDS, target="tiny", training={"steps": 3, "seconds": 1.5}, licence="Apache-2.0")


@pytest.fixture(scope="module")
def llama() -> tf.PreTrainedModel:
    return family("llama")


@pytest.fixture
def saved(llama, tmp_path):
    headfile.save(tmp_path / "head", Head(shape_for(llama)), metadata(llama))
    return tmp_path / "head"


def test_what_is_saved_is_loaded(llama, saved):
    head, meta = headfile.load(saved)
    assert meta == metadata(llama)
    assert head.shape == shape_for(llama)
    assert not head.training
    for name, weight in Head(shape_for(llama)).state_dict().items():
        assert torch.equal(head.state_dict()[name], weight.half().float())


def test_the_metadata_is_readable_json(saved):
    content = json.loads((saved / "head.json").read_text())
    assert content["target"] == "tiny"
    assert content["training"] == {"steps": 3, "seconds": 1.5}
    assert content["shape"]["taps"] == [1, 2, 3]


def test_the_package_ships_the_head_of_the_bundled_model():
    head, meta = headfile.load(SHIPPED)
    assert (meta.model_type, meta.hidden, meta.layers) == ("llama", 576, 30)
    assert head.shape.hidden == 576


def test_a_head_of_the_bundled_model_has_ten_megabytes():
    config = tf.LlamaConfig(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, num_hidden_layers=30
    )
    with torch.device("meta"):
        shape = shape_for(tf.LlamaForCausalLM(config))
    head = Head(shape)
    assert shape.taps == (8, 18, 30)
    assert sum(weight.numel() for weight in head.state_dict().values()) * 2 + 16384 * 4 < 10.3e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_weights_have_the_same_hash_in_every_precision(llama, dtype):
    assert weights_hash(copy.deepcopy(llama).to(dtype)) == weights_hash(llama)


def test_the_weights_have_the_same_hash_packed(llama):
    packed = copy.deepcopy(llama)
    pack(packed)
    assert weights_hash(packed) == weights_hash(llama)
    ids = torch.tensor(IDS)
    assert torch.equal(output_rows(packed, ids), output_rows(llama, ids))
    assert torch.equal(output_rows(llama, ids), llama.lm_head.weight[ids])


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.0.self_attn.q_proj"])
def test_other_weights_have_another_hash(llama, part):
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.get_submodule(part).weight += 0.02 * torch.randn(1, generator=torch.Generator().manual_seed(0))
    assert weights_hash(other) != weights_hash(llama)


def test_a_head_is_accepted_on_its_own_target(llama):
    headfile.check_target(metadata(llama), llama)
    headfile.check_target(metadata(llama), copy.deepcopy(llama).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen2", "architecture is llama; that of the target is qwen2"), ("gemma3", "architecture"), ("gpt2", "llama")],
)
def test_a_head_on_another_architecture_is_refused(llama, name, reason):
    with pytest.raises(ValueError, match=reason):
        headfile.check_target(metadata(llama), family(name))


def test_a_head_on_other_sizes_is_refused(llama):
    for field, size, reason in (("hidden_size", 64, "hidden size is 32"), ("num_hidden_layers", 2, "layers is 3")):
        config = copy.deepcopy(llama.config)
        setattr(config, field, size)
        with pytest.raises(ValueError, match=reason):
            headfile.check_target(metadata(llama), tf.LlamaForCausalLM(config))


def test_a_head_on_other_weights_is_refused(llama):
    with torch.random.fork_rng():
        torch.manual_seed(9)
        other = tf.LlamaForCausalLM(llama.config)
    with pytest.raises(ValueError, match="same sizes and other weights"):
        headfile.check_target(metadata(llama), other)


def test_what_is_no_head_is_refused_with_what_it_should_be(saved, tmp_path):
    with pytest.raises(ValueError, match=r"no head: expected a folder with head\.json and head\.safetensors"):
        headfile.load(tmp_path / "nowhere")
    (saved / "head.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="no head that can be read"):
        headfile.load(saved)
    (saved / "head.json").write_text('{"layout": 2}')
    with pytest.raises(ValueError, match="has layout 2, and this version reads only layout 1"):
        headfile.load(saved)


def test_taps_lie_early_in_the_middle_and_at_the_end():
    assert default_taps(30) == (8, 18, 30)
    assert default_taps(2) == (1, 2)
    assert default_taps(1) == (1,)


def test_taps_that_are_not_there_are_refused(llama):
    with pytest.raises(ValueError, match="layers 1 to 3"):
        shape_for(llama, taps=(1, 4))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_can_have_a_head(name):
    model = family(name)
    shape = shape_for(model)
    served, head = HFModel(model), Head(shape).requires_grad_(False)
    tokens = torch.arange(6)[None]
    states = served(tokens, served.new_cache(1), layers=shape.taps).hidden
    embedded = embeddings(model)[tokens[:, 1:]]
    made = head.step(embedded, head.fuse(states)[:, :-1], torch.arange(5)[None], head.new_cache(1))
    logits = head.out(made) @ output_rows(model, torch.tensor(IDS)).T
    assert logits.shape == (1, 5, len(IDS))
    assert bool(logits.isfinite().all())
    assert served.vocab_size == V
