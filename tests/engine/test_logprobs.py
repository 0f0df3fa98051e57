"""Log-probabilities: raw ones equal log_softmax of the model's logits, drawn ones the distribution drawn from."""

import math

import pytest
import torch

from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked
from engine.plain_distribution import next_distributions
from engine.schedules import BASES, open_engine
from engine.tiny import PROMPT, V, llama

CLOSE = 1e-4
MODEL = llama(max_length=512)
SAMPLINGS = {
    "plain": SamplingParams(seed=1),
    "filtered": SamplingParams(temperature=0.7, top_k=5, top_p=0.95, seed=2),
    "penalised": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={2: 1.0}, seed=3),
    "greedy": SamplingParams(temperature=0),
}
ROUNDS = [
    ("none", None),
    ("model", "token"),
    ("model", "block"),
    ("model", "coupled"),
    ("head", "block"),
    ("ngram", "block"),
]
ROUNDS += [("head-tree", None), ("model", "tree")]


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@torch.no_grad()
def raw(text):
    """Return log_softmax of the model's logits at every position of a text."""
    return MODEL(torch.tensor([list(text)])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("kind", "rule"), ROUNDS)
def test_logprobs_of_emitted_tokens(kind, rule, sampling):
    params = SAMPLINGS[sampling]
    engine = open_engine(kind)
    prompts = [list(PROMPT), [3, 4], BASES[0][:70]]
    outputs = engine.generate(prompts, params, max_tokens=10, logprobs=3, rule=rule)
    assert kind == "none" or sum(output.stats.accepted for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = raw([*prompt, *output.tokens])
        assert len(output.logprobs) == len(output.tokens)
        for i, (token, found) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
            at = expected[len(prompt) - 1 + i]
            assert found.token == token
            assert found.logprob == pytest.approx(float(at[token]), abs=CLOSE)
            assert [value for _, value in found.top] == pytest.approx(at.topk(3).values.tolist(), abs=CLOSE)
            for other, value in found.top:
                assert value == pytest.approx(float(at[other]), abs=CLOSE)
            if params.temperature == 0:
                assert found.drawn == 0
                assert -math.inf < found.logprob < 0
                continue
            drawn = next_distributions(MODEL, [[*prompt, *output.tokens[:i]]], params, len(prompt))[0]
            assert found.drawn == pytest.approx(float(drawn[token].log()), abs=CLOSE)


def test_raw_and_drawn_differ_where_sampling_is_not_the_models_own():
    """A control: with filters the two are not the same number, so one cannot stand for the other."""
    [output] = open_engine("none").generate([list(PROMPT)], SAMPLINGS["filtered"], max_tokens=10, logprobs=True)
    assert max(abs(each.logprob - each.drawn) for each in output.logprobs) > 100 * CLOSE
    [output] = open_engine("none").generate([list(PROMPT)], SAMPLINGS["plain"], max_tokens=10, logprobs=True)
    assert max(abs(each.logprob - each.drawn) for each in output.logprobs) < CLOSE


@pytest.mark.parametrize("length", [2, 10, 64, 65, 66, 129, 200, 400])
@pytest.mark.parametrize("kind", ["none", "head"])
def test_logprobs_of_the_prompt_across_chunk_borders(length, kind):
    prompt = (BASES[0] + BASES[1])[:length]
    output = open_engine(kind).generate(prompt, SAMPLINGS["plain"], max_tokens=2, prompt_logprobs=2)
    expected = raw(prompt)
    assert [each.token for each in output.prompt_logprobs] == prompt[1:]
    for i, found in enumerate(output.prompt_logprobs):
        assert found.logprob == pytest.approx(float(expected[i, prompt[i + 1]]), abs=CLOSE)
        assert found.drawn is None
        assert [value for _, value in found.top] == pytest.approx(expected[i].topk(2).values.tolist(), abs=CLOSE)


def test_a_prompt_of_one_token_has_no_logprobs():
    output = open_engine("none").generate([3], SAMPLINGS["plain"], max_tokens=2, prompt_logprobs=True)
    assert output.prompt_logprobs == []


def test_logprobs_of_a_prompt_that_is_not_continued():
    """max_tokens=0 scores a prompt: nothing is emitted, and every token of the prompt has its log-probability."""
    prompt = BASES[0][:130]
    output = open_engine("none").generate(prompt, SAMPLINGS["plain"], max_tokens=0, prompt_logprobs=True)
    assert (output.tokens, output.finish_reason) == ([], "length")
    expected = raw(prompt)
    found = [each.logprob for each in output.prompt_logprobs]
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=CLOSE)


def test_logprobs_while_other_rows_decode():
    """A prompt is read chunk by chunk beside rows that want no log-probabilities, or others."""
    engine = open_engine("model")
    prompt = (BASES[1] + BASES[0])[:300]
    options = [
        {"max_tokens": 60},
        {"max_tokens": 60, "logprobs": 5},
        {"max_tokens": 6, "logprobs": 1, "prompt_logprobs": 1},
    ]
    prompts = [list(PROMPT), [3, 4], prompt]
    sessions = [engine.prepare(p, SAMPLINGS["plain"], **each) for p, each in zip(prompts, options, strict=True)]
    engine._loop.submit(sessions[:2])
    engine._loop.step()
    engine._run(sessions[2:], lambda: True)
    engine._loop.run_until(lambda: engine._loop.is_idle)
    nothing, five, one = (session.result() for session in sessions)
    assert nothing.logprobs is None
    assert nothing.prompt_logprobs is None
    assert [len(each.top) for each in five.logprobs] == [5] * 60
    assert [len(each.top) for each in one.logprobs] == [1] * 6
    expected = raw([*prompt, *one.tokens])
    found = [each.logprob for each in (*one.prompt_logprobs, *one.logprobs)]
    followers = [*prompt[1:], *one.tokens]
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(followers)], abs=CLOSE)


def test_chunks_of_a_stream_carry_the_logprobs_of_their_tokens():
    engine = open_engine("model")
    whole = engine.generate(list(PROMPT), SAMPLINGS["plain"], max_tokens=12, logprobs=2)
    chunks = list(engine.stream(list(PROMPT), SAMPLINGS["plain"], max_tokens=12, logprobs=2))
    assert [each for chunk in chunks for each in chunk.logprobs] == whole.logprobs
    assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("wrong", [-1, V + 1, 1.5])
def test_a_number_of_alternatives_that_is_none_is_refused(name, wrong):
    with pytest.raises((ValueError, TypeError), match=name):
        open_engine("none").generate(list(PROMPT), SAMPLINGS["plain"], max_tokens=2, **{name: wrong})


def test_all_alternatives_are_the_whole_distribution():
    [output] = open_engine("none").generate([list(PROMPT)], SAMPLINGS["greedy"], max_tokens=3, logprobs=V)
    for found in output.logprobs:
        assert sorted(token for token, _ in found.top) == list(range(V))
        assert math.fsum(math.exp(value) for _, value in found.top) == pytest.approx(1)
        assert found.top[0] == (found.token, found.logprob), "greedy: the likeliest is the emitted one"
