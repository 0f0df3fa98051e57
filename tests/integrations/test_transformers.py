"""Inside transformers' generate: greedy text is identical, and every option is either honoured or refused."""

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.core.types import InexactError
from engine.tiny import PROMPT, V, llama, neighbour
from models.families import family
from models.test_encoder_decoder import pair

PROMPTS = [[5, 9, 4, 8, 5, 9], [11, 12, 11], [3, 7, 3, 7, 3, 7, 3, 7, 20]]
PAD = 0
CHAINS = [("ngram", "block"), ("suffix", "token"), ("prompt-lookup", "coupled"), ("early-exit:1", "block")]
PAIRS = [*CHAINS, ("ngram", "tree"), ("early-exit:2", "tree"), (None, "block")]
every_pair = pytest.mark.parametrize(("drafter", "rule"), PAIRS)


def inputs(prompts=PROMPTS) -> dict[str, torch.Tensor]:
    """Return the prompts as one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def ending(name="llama", eos=None):
    model = family(name)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = eos
    return model


def both(model, batch=None, **options):
    """Return the outputs of plain generate and of ours."""
    our_options = {name: options.pop(name) for name in ("drafter", "rule", "num_draft_tokens") if name in options}
    batch = inputs() if batch is None else batch
    plain = model.generate(**batch, **options)
    return plain, model.generate(**batch, custom_generate=dp.transformers.generate, **our_options, **options)


@every_pair
def test_greedy_text_is_that_of_plain_generate(drafter, rule):
    plain, ours = both(ending(), max_new_tokens=14, do_sample=False, drafter=drafter, rule=rule, num_draft_tokens=4)
    assert torch.equal(plain, ours)


PROCESSORS = {
    "penalty": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "lengths": {"min_new_tokens": 6, "forced_eos_token_id": 9},
    "suppressed": {"suppress_tokens": [16], "begin_suppress_tokens": [26]},
    "bias": {"sequence_bias": {(24,): 2.0, (16, 7): -9.0}},
    "bad words": {"bad_words_ids": [[26], [50, 24]]},
    "decay": {"exponential_decay_length_penalty": (1, 1.9)},
    "watermark": {"watermarking_config": tf.WatermarkingConfig(bias=2.5)},
    "by row": {"prefix_allowed_tokens_fn": lambda row, text: [t for t in range(61) if (t + len(text) + row) % 3]},
}


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_is_called_as_in_plain_generate(processor, drafter):
    """With padded rows of different lengths, as processors depend on row, length and tokens. Each changes the text."""
    options = {"max_new_tokens": 12, "do_sample": False, "drafter": drafter, "num_draft_tokens": 3}
    plain, ours = both(ending(eos=2), **options, **PROCESSORS[processor])
    assert torch.equal(plain, ours)
    assert not torch.equal(plain, ending(eos=2).generate(**inputs(), max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "gemma3", "mistral-window"])
def test_left_padding_is_taken_off_and_put_back_in_every_family(name):
    plain, ours = both(ending(name), max_new_tokens=10, do_sample=False, num_draft_tokens=3)
    assert torch.equal(plain, ours)


def some_ends(model):
    """Return two tokens that plain decoding generates somewhere in the middle."""
    made = model.generate(**inputs(), max_new_tokens=14, do_sample=False)[:, len(inputs()["input_ids"][0]) :]
    return [int(made[0, 5]), int(made[2, 8])]


def test_rows_end_at_any_of_several_end_tokens_and_are_padded():
    eos = some_ends(ending())
    plain, ours = both(ending(eos=eos), max_new_tokens=14, do_sample=False, num_draft_tokens=5)
    assert torch.equal(plain, ours)
    assert (ours[:, -1] == PAD).any()


class After(tf.StoppingCriteria):
    """Ends a row after the third occurrence of a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(1) >= 3


def test_criteria_are_checked_after_every_token():
    eos = [60]
    token = some_ends(ending())[0]
    criteria = tf.StoppingCriteriaList([After(token)])
    plain, ours = both(ending(eos=eos), max_new_tokens=16, stopping_criteria=criteria, do_sample=False)
    assert torch.equal(plain, ours)


class Puts:
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_a_streamer_is_fed_and_closed_as_by_plain_generate(prompts):
    model = ending(eos=some_ends(ending()))
    streams = [Puts(), Puts()]
    model.generate(**inputs(prompts), max_new_tokens=12, do_sample=False, streamer=streams[0])
    custom = {"custom_generate": dp.transformers.generate, "num_draft_tokens": 4}
    model.generate(**inputs(prompts), max_new_tokens=12, do_sample=False, streamer=streams[1], **custom)
    assert streams[0].seen == streams[1].seen
    assert (streams[0].ended, streams[1].ended) == (1, 1)


def drawn(model, **options):
    return model.generate(
        **inputs(), custom_generate=dp.transformers.generate, do_sample=True, max_new_tokens=12, **options
    )


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1"])
def test_the_global_seed_or_an_own_one_gives_the_same_text_again(drafter):
    model = ending()
    torch.manual_seed(3)
    one = drawn(model, drafter=drafter)
    torch.manual_seed(3)
    assert torch.equal(one, drawn(model, drafter=drafter))
    assert not torch.equal(one, drawn(model, drafter=drafter))
    assert torch.equal(drawn(model, drafter=drafter, seed=0), drawn(model, drafter=drafter, seed=0))


def test_rows_for_one_prompt_differ():
    ids = torch.tensor([PROMPT])
    made = llama().generate(
        ids, num_return_sequences=5, do_sample=True, max_new_tokens=12, custom_generate=dp.transformers.generate
    )
    assert len(made.unique(dim=0)) == 5


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_is_served_too(name):
    model, _ = pair(name)
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 1, 1]]),
        "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]]),
    }
    options = {"max_new_tokens": 10, "do_sample": False, "num_draft_tokens": 3, "drafter": "ngram"}
    plain, ours = both(model, batch, **options)
    assert torch.equal(plain, ours)


def test_a_dictionary_is_returned_where_one_is_asked_for():
    plain, ours = both(ending(), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert type(plain) is type(ours)
    assert torch.equal(plain.sequences, ours.sequences)


def test_a_model_may_draft():
    plain, ours = both(
        llama(), {"input_ids": torch.tensor([PROMPT])}, max_new_tokens=9, drafter=neighbour(), rule="block"
    )
    assert torch.equal(plain, ours)


def test_the_model_is_not_altered():
    model = ending()
    before = model.config.to_dict(), model.generation_config.to_dict(), [len(m._forward_hooks) for m in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn(model)
    after = model.config.to_dict(), model.generation_config.to_dict(), [len(m._forward_hooks) for m in model.modules()]
    assert before == after
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


REFUSED = {
    "beams": ({"num_beams": 2}, ValueError, "generation mode 'beam_search'"),
    "scores": (
        {"output_scores": True, "return_dict_in_generate": True},
        ValueError,
        "output_scores=True is not collected",
    ),
    "guidance": (
        {"guidance_scale": 1.5},
        InexactError,
        "UnbatchedClassifierFreeGuidanceLogitsProcessor.* keeps a cache",
    ),
    "watermark": (
        {"watermarking_config": tf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
        InexactError,
        "SynthIDTextWatermarkLogitsProcessor.* keeps the contexts",
    ),
    "no room": ({"max_new_tokens": 400}, ValueError, "positions for 128: set max_new_tokens"),
    "a drafter": ({"drafter": "nobody"}, ValueError, "nobody"),
    "a rule": ({"rule": "nobody"}, ValueError, "rule must be one of"),
    "a typo": ({"drafters": "ngram"}, ValueError, "drafters"),
    "embeddings": ({"inputs_embeds": torch.zeros(3, 9, 32), "max_new_tokens": 3}, ValueError, "inputs_embeds"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(what):
    options, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        ending().generate(
            **inputs(),
            **{"do_sample": "beams" not in what, "max_new_tokens": 4, **options},
            custom_generate=dp.transformers.generate,
        )


def test_padding_on_the_right_is_refused():
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    with pytest.raises(ValueError, match="pad on the left"):
        ending().generate(**batch, max_new_tokens=3, custom_generate=dp.transformers.generate)


def test_a_filled_cache_is_refused():
    model = ending()
    past = model(torch.tensor([[5, 6]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds tokens already"):
        model.generate(
            torch.tensor([[5, 6, 7]]), past_key_values=past, max_new_tokens=2, custom_generate=dp.transformers.generate
        )


def test_rows_that_may_end_apart_need_a_token_to_pad_with():
    model = llama()
    ids = torch.tensor([PROMPT, PROMPT])
    criteria = tf.StoppingCriteriaList([After(1)])
    with pytest.raises(ValueError, match="set pad_token_id"):
        model.generate(ids, stopping_criteria=criteria, max_new_tokens=3, custom_generate=dp.transformers.generate)


def test_a_processor_that_leaves_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="row 0: the scores after token 10 are not a distribution"):
        llama().generate(
            torch.tensor([PROMPT]),
            suppress_tokens=list(range(V)),
            max_new_tokens=3,
            custom_generate=dp.transformers.generate,
        )
