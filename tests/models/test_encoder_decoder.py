"""Encoder-decoder models: rounds over the cache give the logits of a plain forward."""

import pytest
import torch
import transformers as tf

from draftproof.core.types import InexactError
from draftproof.models.encoder_decoder import EncoderDecoder
from draftproof.models.hf import HFModel
from draftproof.models.interface import Cache, Model
from models.families import V, family
from models.reference import TOLERANCE, Rows

SOURCES = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
CONFIGS = {
    "t5": lambda: tf.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=1.5
    ),
    "bart": lambda: tf.BartConfig(
        vocab_size=V,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=24,
        decoder_start_token_id=2,
        init_std=0.3,
        **BART,
    ),
}


def pair(name, implementation="sdpa"):
    torch.manual_seed(0)
    model = tf.AutoModelForSeq2SeqLM.from_config(CONFIGS[name](), attn_implementation=implementation).eval()
    model.generation_config.decoder_start_token_id = 2
    return model, EncoderDecoder(model)


def alone(model, sources):
    @torch.no_grad()
    def plain(row, answer):
        return model(input_ids=torch.tensor([sources[row]]), decoder_input_ids=torch.tensor([answer])).logits[0]

    return plain


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rounds_with_rollbacks_equal_a_plain_forward(name, implementation):
    model, served = pair(name, implementation)
    rows = Rows(served, served.encode(SOURCES), [[served.start, 5, 6, 7], [served.start], [served.start]])
    for accepted in ([0, 3, 3], [3, 0, 1], [1, 2, 0]):
        assert rows.chain_round(3, accepted, alone(model, SOURCES)) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_leave_and_enter_with_their_sources(name):
    model, served = pair(name)
    rows = Rows(served, served.encode(SOURCES), [[served.start, 5], [served.start], [served.start, 4, 4]])
    late = Rows(served, served.encode([[3] * 9]), [[served.start, 8]])
    rows.cache = rows.cache.take([2, 0]).join(late.cache)
    rows.texts = [rows.texts[2], rows.texts[0], *late.texts]
    sources = [SOURCES[2], SOURCES[0], [3] * 9]
    for accepted in ([0, 2, 1], [2, 0, 1]):
        assert rows.chain_round(2, accepted, alone(model, sources)) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_scored_positions_are_those_of_a_plain_forward(name):
    model, served = pair(name)
    forward = served(torch.tensor([[2, 5, 6]] * 3), served.encode(SOURCES), layers=(2, 1), scored=2)
    for row, source in enumerate(SOURCES):
        with torch.no_grad():
            plain = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[2, 5, 6]]), output_hidden_states=True
            )
        assert torch.allclose(plain.logits[0, -2:], forward.logits[row], atol=TOLERANCE)
        for layer, states in zip((2, 1), forward.hidden, strict=True):
            assert torch.allclose(plain.decoder_hidden_states[layer][0], states[row], atol=TOLERANCE)


def test_padding_past_the_last_position_is_harmless():
    model, served = pair("bart")
    answer = [2, *([5, 6, 7] * 7)]
    rows = Rows(served, served.encode(SOURCES[:2]), [answer, [2]])
    logits = served(torch.tensor([[answer[-1], 4, 8, 0, 0], [2, 5, 6, 7, 8]]), rows.cache).logits
    plain = alone(model, SOURCES)
    assert torch.allclose(plain(0, [*answer, 4, 8])[-3:], logits[0, :3], atol=TOLERANCE)
    assert torch.allclose(plain(1, [2, 5, 6, 7, 8]), logits[1], atol=TOLERANCE)


def test_the_users_model_is_not_altered():
    model, served = pair("t5")
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before = model.config.to_dict()
    served(torch.tensor([[0]]), served.encode([[4]]), layers=(1,))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.config.to_dict() == before


def test_it_is_a_model_and_its_cache_a_cache():
    _, served = pair("bart")
    assert isinstance(served, Model)
    assert isinstance(served.encode(SOURCES), Cache)
    assert (served.start, served.max_length, served.vocab_size) == (2, 24, V)


def test_what_it_cannot_do_is_refused():
    model, served = pair("t5")
    cache = served.encode(SOURCES)
    with pytest.raises(InexactError, match="use a rule for chains"):
        served(torch.tensor([[0, 1]] * 3), cache, parents=torch.tensor([[-1]] * 3))
    with pytest.raises(InexactError, match="use a rule for chains"):
        cache.keep(torch.tensor([0, 0, 0]), torch.tensor([[-1]] * 3))
    with pytest.raises(ValueError, match=r"take its cache from encode\(sources\)"):
        served.new_cache(1)
    with pytest.raises(ValueError, match=r"sources have lengths \[2, 0\]"):
        served.encode([[1, 2], []])
    with pytest.raises(ValueError, match="use EncoderDecoder"):
        HFModel(model)
    with pytest.raises(ValueError, match="has no encoder: use HFModel"):
        EncoderDecoder(family("llama"))
