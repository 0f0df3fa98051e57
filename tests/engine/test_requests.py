"""Requests: errors of one do not affect others, options are honoured, and unknown options are refused."""

import math

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import InexactError
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.models.toy import Toy
from engine.plain_distribution import next_distributions
from engine.scripted import CountingTarget, ScriptedDrafter, cycle
from engine.tiny import PROMPT, V, llama, neighbour

RULES = ["token", "block", "coupled", "tree"]

# ------------------------------------------------------------------------------------------------ NaN in one row


def broken_at(token: int, value: float) -> Toy:
    """Make a target that emits 1 2 3 1 2 3 …, with scores of `value` after `token`."""
    model = cycle(1, 2, 3)
    model.table[token] = value
    return model


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=0), SamplingParams(temperature=0), SamplingParams(top_p=0.9, seed=0)]
)
def test_scores_that_are_not_a_distribution_fail_their_request_and_no_other(sampling, value, rule):
    engine = Engine(broken_at(5, value), None, ScriptedDrafter([1, 2, 3] * 9), rule=rule, num_draft_tokens=3)
    outputs = engine.generate([[1, 2], [1, 5], [3, 1, 2]], sampling, max_tokens=8)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[0].tokens == [3, 1, 2, 3, 1, 2, 3, 1]
    assert outputs[2].tokens == [3, 1, 2, 3, 1, 2, 3, 1]
    assert outputs[1].tokens == []
    assert "the scores after token 2 are not a distribution" in outputs[1].error


def test_tokens_before_broken_scores_are_kept():
    model = broken_at(3, math.nan)
    [output] = Engine(model, None, None).generate([[1]], max_tokens=8)
    assert (output.tokens, output.finish_reason) == ([2, 3], "error")


@pytest.mark.parametrize("rule", RULES)
def test_scores_that_are_broken_only_after_a_rejected_draft_token_do_no_harm(rule):
    """The drafter proposes 5, after which scores are NaN; the target never emits it."""
    engine = Engine(broken_at(5, math.nan), None, ScriptedDrafter([1, 5, 5, 5] * 9), rule=rule, num_draft_tokens=3)
    output = engine.generate([1], max_tokens=8)
    assert output.tokens == [2, 3, 1, 2, 3, 1, 2, 3]
    assert output.stats.drafted > 8


@pytest.mark.parametrize("rule", RULES)
def test_tokens_of_a_round_before_broken_scores_are_kept(rule):
    engine = Engine(broken_at(3, math.nan), None, ScriptedDrafter([1, 2, 3, 1, 2]), rule=rule, num_draft_tokens=4)
    [output] = engine.generate([[1]], max_tokens=8)
    assert (output.tokens, output.finish_reason) == ([2, 3], "error")
    assert "the scores after token 3 are not a distribution" in output.error


def test_a_single_prompt_raises():
    engine = Engine(broken_at(5, math.nan), None, None)
    with pytest.raises(RuntimeError, match="the scores after token 2 are not a distribution"):
        engine.generate([1, 5])
    with pytest.raises(RuntimeError, match="the scores after token 2 are not a distribution"):
        list(engine.stream([1, 5]))


def test_a_drafter_with_broken_scores_costs_nothing_but_its_drafts():
    plain = dp.load(llama(), None).generate([list(PROMPT)], seed=1, max_tokens=9)[0].tokens
    wild = neighbour.__wrapped__()
    wild.lm_head.weight.data.fill_(math.nan)
    engine = dp.load(llama(), wild, rule="coupled", num_draft_tokens=3)
    assert engine.generate([list(PROMPT)], seed=1, max_tokens=9)[0].tokens == plain


# ------------------------------------------------------------------------------------------------ cancellation


def test_closing_a_stream_stops_the_work():
    target = CountingTarget(cycle(1, 2, 3))
    engine = Engine(target, None, ScriptedDrafter([1, 2, 3] * 30), num_draft_tokens=2)
    stream = engine.stream([1], max_tokens=60)
    assert next(stream).tokens == [2, 3, 1]
    passes = target.passes
    stream.close()
    assert target.passes == passes
    assert engine.generate([1], max_tokens=4).tokens == [2, 3, 1, 2], "the engine can be used again"


def test_a_cancelled_batch_ends_between_rounds_and_keeps_its_tokens():
    """Two of three texts run side by side; the third has not started when the second round is the last."""
    engine = Engine(cycle(1, 2, 3), None, None, limits=Limits(max_batch=2))
    rounds = iter([True, False])
    outputs = engine.generate([[1], [2], [3]], max_tokens=[5, 2, 5], go_on=lambda: next(rounds))
    assert [output.tokens for output in outputs] == [[2, 3], [3, 1], []]
    assert [output.finish_reason for output in outputs] == ["cancelled", "length", "cancelled"]
    assert engine.generate([1], max_tokens=3).tokens == [2, 3, 1], "the engine can be used again"


def test_a_stream_runs_no_round_before_it_is_asked_to():
    target = CountingTarget(cycle(1, 2, 3))
    stream = Engine(target, None, None).stream([1], max_tokens=5)
    assert target.passes == 0
    next(stream)
    assert target.passes == 1


# ------------------------------------------------------------------------------------------------ logprobs


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.4, frequency_penalty=0.3, seed=2),
    ],
)
def test_logprobs_are_those_of_plain_decoding(sampling, rule):
    engine = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens=4)
    outputs = engine.generate([list(PROMPT), [3, 4]], sampling, max_tokens=10, logprobs=True)
    for output, prompt in zip(outputs, (list(PROMPT), [3, 4]), strict=True):
        text = list(prompt)
        for token, logprobs in zip(output.tokens, output.logprobs, strict=True):
            dist = next_distributions(llama(), [text], sampling, len(prompt))[0]
            assert logprobs.token == token
            assert logprobs.drawn == pytest.approx(float(dist[token].log()), abs=1e-4)
            text.append(token)


def test_no_logprobs_unless_asked_for():
    assert dp.load(llama(), "ngram").generate(list(PROMPT), max_tokens=2).logprobs is None


# ------------------------------------------------------------------------------------------------ figures


def test_the_figures_add_up():
    engine = Engine(cycle(1, 2, 3), None, ScriptedDrafter([1, 2, 3, 1, 2, 3, 0, 2, 3, 1]), num_draft_tokens=3)
    stats = engine.generate([1], max_tokens=9).stats
    # rounds: 2 3 1 accepted, then 2 | 3 accepted, 0 rejected, then 1 | 2 3 accepted, as the budget allows, then 1
    assert (stats.rounds, stats.drafts, stats.emitted) == (3, 3, 9)
    assert (stats.drafted, stats.accepted) == (8, 6)
    assert stats.accepted_at == [3, 2, 1]
    assert stats.acceptance_rate == pytest.approx(6 / 8)
    assert stats.mean_acceptance_length == pytest.approx(3)
    assert stats.tokens_per_pass == pytest.approx(3)
    assert stats.rates_by_position == pytest.approx([1, 2 / 3, 1 / 3])
    assert set(stats.seconds) == {"prefill", "draft", "score", "warp", "verify", "commit"}


def test_plain_decoding_has_no_drafts():
    stats = Engine(cycle(1, 2, 3), None, None).generate([1], max_tokens=5).stats
    assert (stats.rounds, stats.drafts, stats.drafted, stats.emitted) == (5, 0, 0, 5)
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_pass) == (0, 1, 1)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temprature": 0.7}, TypeError, "unknown option 'temprature'; sampling takes temperature"),
        ({"top_k": 0}, ValueError, "top_k must be None"),
        ({"max_tokens": -1}, ValueError, "max_tokens must be a whole number ≥ 0"),
        ({"max_tokens": [1, 2]}, ValueError, "one for each of 1 prompts"),
        ({"sampling": [SamplingParams(), SamplingParams()]}, ValueError, "one for each of 1 prompts; got 2"),
        ({"sampling": SamplingParams(), "top_k": 3}, ValueError, r"sampling or its fields \(top_k\), not both"),
        ({"num_beams": 3}, ValueError, "not a transformers model"),
    ],
)
def test_what_generate_does_not_know_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Engine(cycle(1, 2), None, None).generate([[1]], **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([9], "prompt token 9 is outside the vocabulary"),
        ("hello", "no tokenizer"),
        ([-3, 2], "prompt token -3 is outside"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        Engine(cycle(1, 2), None, None).generate(prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "blocks"}, ValueError, "rule must be one of 'token'"),
        ({"drafter": "engram"}, ValueError, "engram"),
        ({"num_draft_tokens": -1}, ValueError, 'num_draft_tokens must be "auto" or a whole number'),
        ({"num_draft_tokens": "much"}, ValueError, "num_draft_tokens"),
        ({"max_batch": 0}, ValueError, "max_batch must be a whole number ≥ 1"),
        ({"max_length": 0}, ValueError, "max_length must be a whole number ≥ 1"),
        ({"drafter": "early-exit:9"}, ValueError, "first_layers"),
        ({"drafter": 3}, ValueError, "drafter must be a name, a folder, a transformers model or a Model; got a int"),
        ({"target": 3}, ValueError, "target must be a name, a folder, a transformers model or a Model; got a int"),
        ({"max_bach": 4}, TypeError, "max_bach"),
    ],
)
def test_what_load_does_not_know_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        dp.load(**{"target": llama(), **options})


def test_no_prompts_are_no_texts():
    assert Engine(cycle(1, 2), None, None).generate([]) == []


def test_a_tree_under_a_chain_rule_is_refused():
    engine = dp.load(llama(), "ngram", rule="block", branches=2)
    with pytest.raises(InexactError, match='use rule="tree"'):
        engine.generate([list(PROMPT)], max_tokens=4)


@pytest.mark.parametrize("place", ["target", "drafter"])
def test_a_model_that_cannot_go_back_is_refused_at_load(place):
    mamba = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1)).eval()
    with pytest.raises(InexactError, match="cannot roll back after a rejection"):
        dp.load(mamba if place == "target" else llama(), "ngram" if place == "target" else mamba)


def test_another_vocabulary_without_a_mapping_is_refused_at_load():
    with pytest.raises(InexactError, match="the drafter scores 2000 tokens and the target 8"):
        dp.load(llama(), llama(2000))


@pytest.mark.parametrize("size", [V - 2, V + 3])
def test_a_vocabulary_that_is_padded_otherwise_is_served(size):
    """Tokens outside the target's vocabulary are never drafted."""
    engine = dp.load(llama(), neighbour(size), num_draft_tokens=4)
    outputs = engine.generate([list(PROMPT)] * 6, max_tokens=20)
    assert max(max(output.tokens) for output in outputs) < V
    assert sum(output.stats.accepted for output in outputs) > 0


# ------------------------------------------------------------------------------------------------ the user's model


def snapshot(model):
    return (
        model.config.to_dict(),
        model.generation_config.to_dict(),
        [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()],
        {name: hash(tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()},
        [tensor.data_ptr() for tensor in model.parameters()],
    )


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1", "model"])
@pytest.mark.parametrize("rule", ["block", "tree"])
def test_a_model_that_is_passed_in_is_never_altered(drafter, rule):
    models = [llama(), neighbour()]
    before = [snapshot(model) for model in models]
    engine = dp.load(models[0], models[1] if drafter == "model" else drafter, rule=rule)
    engine.generate([list(PROMPT), [1]], max_tokens=6)
    list(engine.stream([1, 2], max_tokens=4, temperature=0))
    assert [snapshot(model) for model in models] == before


def test_the_snapshot_shows_a_change():
    model = neighbour.__wrapped__()
    before = snapshot(model)
    model.lm_head.weight.data[0, 0] += 1e-6
    assert snapshot(model) != before


def test_beam_search_is_transformers_own():
    ids = torch.tensor([PROMPT])
    want = llama().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3, length_penalty=0.5, do_sample=False
    )
    made = dp.load(llama(), "ngram").generate(list(PROMPT), max_tokens=6, num_beams=3, length_penalty=0.5)
    assert made.tokens == want[0, len(PROMPT) :].tolist()
