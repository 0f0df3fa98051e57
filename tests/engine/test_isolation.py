"""What goes wrong with one request, drafter, thread or stream does not reach the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import draftproof as dp
from draftproof.drafters.head import HeadDrafter
from draftproof.engine.beam_search import check_beams
from draftproof.engine.limits import Limits
from draftproof.engine.request import budgets_of
from draftproof.rules.lossy import lenient
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import on_target

S = dp.SamplingParams
RULES = ("token", "block", "tree")


class Declaring:
    """Drafts token 7 in the second row and declares a wrong distribution for it; the first row drafts rightly."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def propose(self, contexts, k, rng):
        B = len(contexts)
        tokens, q = torch.zeros((B, 1), dtype=torch.long), torch.full((B, 1, V), 1 / V)
        if B == 2:
            tokens[1] = 7
            row = q[1, 0]
            if self.wrong == "NaN":
                row[3] = torch.nan
            elif self.wrong == "negative":
                row[3], row[7] = -0.5, 0.5 + 2 / V
            elif self.wrong == "infinite":
                row[3] = torch.inf
            elif self.wrong == "zero":
                row[7] = 0.0
        dist = dp.Distribution.of(q)
        if B == 2 and self.wrong == "above one":
            dist = replace(dist, lse=dist.lse - torch.tensor([[0.0], [5.0]]))
        return dp.Draft(tokens, torch.tensor([min(n, 1) for n in k]), dist)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrong", ["NaN", "negative", "infinite", "zero", "above one"])
def test_a_drafter_with_a_wrong_distribution_fails_its_request_by_name(wrong, rule):
    engine = dp.load(llama(), Declaring(wrong), rule=rule, num_draft_tokens=1)
    right, failed = engine.generate([list(PROMPT)] * 2, [S(seed=1), S(seed=2)], max_tokens=6)
    assert (right.finish_reason, len(right.tokens)) == ("length", 6)
    assert failed.finish_reason == "error"
    assert not failed.tokens
    assert "drafter Declaring proposed token 7 at draft position 0 with a declared probability of" in failed.error


def test_a_right_declaration_passes():
    outputs = dp.load(llama(), Declaring("nothing"), num_draft_tokens=1).generate([list(PROMPT)] * 2, S(seed=1))
    assert [output.finish_reason for output in outputs] == ["length", "length"]


class Returning:
    """Returns whatever it is told to."""

    def __init__(self, made) -> None:
        self.made = made

    def propose(self, contexts, k, rng):
        return self.made


TOKENS, LENGTHS = torch.tensor([[1, 2]]), torch.tensor([2])


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (dp.Draft(torch.tensor([[99, 1]]), LENGTHS), RuntimeError, "drafter Returning proposed token 99"),
        (dp.Draft(torch.tensor([[-5, 1]]), LENGTHS), RuntimeError, "drafter Returning proposed token -5"),
        (dp.Draft(TOKENS, torch.tensor([7])), ValueError, "drafter Returning drafted 7 tokens for row 0"),
        (dp.Draft(TOKENS, torch.tensor([-1])), RuntimeError, "drafter Returning proposed a draft of length -1"),
    ],
)
def test_a_draft_that_is_none_names_the_drafter(made, error, message):
    with pytest.raises(error, match=message):
        dp.load(llama(), Returning(made), num_draft_tokens=2).generate(list(PROMPT), S(seed=1), max_tokens=4)


def test_no_draft_at_all_names_the_drafter():
    """The test suite checks annotations at run time, so either error is right: both name the drafter's method."""
    with pytest.raises(TypeError, match=r"Returning|propose"):
        dp.load(llama(), Returning(None), num_draft_tokens=2).generate(list(PROMPT), S(seed=1), max_tokens=4)


# ------------------------------------------------------------------------------------------------- one bad request


def raising(output):
    raise KeyError("no such state")


def test_one_bad_prompt_in_a_list_fails_alone():
    prompts = [list(PROMPT), [], list(PROMPT) * 10, [99], list(PROMPT)]
    outputs = dp.load(llama(), "ngram").generate(prompts, S(seed=1), max_tokens=3)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "error", "length"]
    assert outputs[1].error.startswith("prompt 1: the prompt is empty")
    assert outputs[2].error.startswith("prompt 2: the prompt has 100 tokens")
    assert outputs[3].error == f"prompt 3: prompt token 99 is outside the vocabulary [0, {V})"


def test_a_bias_outside_the_vocabulary_fails_alone():
    engine = dp.load(llama(), "ngram")
    right, failed = engine.generate([[1], [1]], [S(seed=1), S(seed=1, logit_bias={99: 1.0})], max_tokens=3)
    assert right.finish_reason == "length"
    assert failed.error == f"prompt 1: logit_bias names token 99; the vocabulary is [0, {V})"


@pytest.mark.parametrize("grammar", [raising, lambda output: [True] * V])
def test_a_grammar_that_fails_ends_its_request(grammar):
    with pytest.raises(RuntimeError, match=r"its grammar failed: (KeyError|TypeError)"):
        dp.load(llama(), "ngram").generate([1], S(seed=1), allowed=grammar)


# ------------------------------------------------------------------------------------------------ threads and streams

DRAFTERS = {
    "head": lambda: HeadDrafter(on_target()),
    "model": neighbour,
    "ngram": lambda: "ngram",
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_several_threads_on_one_engine_get_their_own_texts(name):
    engine = dp.load(llama(), DRAFTERS[name](), num_draft_tokens=3)
    alone = [engine.generate(list(PROMPT), S(seed=seed), max_tokens=20).tokens for seed in range(6)]
    start = threading.Barrier(6)

    def one(seed):
        start.wait()
        return engine.generate(list(PROMPT), S(seed=seed), max_tokens=20).tokens

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == alone
    assert engine.generate(list(PROMPT), S(seed=0), max_tokens=20).tokens == alone[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_interleaved_streams_keep_their_state_and_their_texts(name):
    engine = dp.load(llama(), DRAFTERS[name](), num_draft_tokens=3)

    def alone(seed):
        chunks = list(engine.stream(list(PROMPT), S(seed=seed), max_tokens=24))
        return [chunk.tokens for chunk in chunks]

    expected = {1: alone(1), 2: alone(2)}
    streams = {seed: engine.stream(list(PROMPT), S(seed=seed), max_tokens=24) for seed in expected}
    got = {seed: [] for seed in expected}
    while streams:
        for seed in list(streams):
            chunk = next(streams[seed], None)
            if chunk is None:
                del streams[seed]
            else:
                got[seed].append(chunk.tokens)
        engine.generate([3], S(seed=9), max_tokens=2)
    assert got == expected


def test_a_chunk_shows_the_counters_of_its_round():
    chunks = list(dp.load(llama(), "ngram", num_draft_tokens=2).stream(list(PROMPT), S(seed=3), max_tokens=12))
    assert [chunk.stats.rounds for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert chunks[0].stats.emitted == len(chunks[0].tokens)


# ------------------------------------------------------------------------------------------------------- what is said


def test_a_lossy_rule_shows_in_the_output():
    engine = dp.load(llama(), neighbour(), rule=lenient(0.5), num_draft_tokens=3)
    output = engine.generate(list(PROMPT), S(seed=1), max_tokens=12)
    assert not output.exact
    assert 0 < output.deviation <= 1
    *_, last = engine.stream(list(PROMPT), S(seed=1), max_tokens=12)
    assert (last.exact, last.deviation) == (False, output.deviation)
    exact = dp.load(llama(), neighbour()).generate(list(PROMPT), S(seed=1), max_tokens=4)
    assert (exact.exact, exact.deviation) == (True, None)


def test_an_engine_says_what_it_is():
    shown = repr(dp.load(llama(), "ngram", rule="token"))
    assert shown == "Engine(target: LlamaForCausalLM, rule: token, drafter: NGram, draft length: auto, device: cpu)"


def test_the_default_sampling_is_the_models_own_or_a_temperature():
    engine = dp.load(llama.__wrapped__(), None)
    assert engine.default_sampling == S(temperature=0.7)
    engine.hf.generation_config.update(do_sample=True, temperature=0.3, top_p=0.8, top_k=5)
    assert engine.default_sampling == S(temperature=0.3, top_p=0.8, top_k=5)
    assert engine._samplings(None, {"seed": 4}, 1) == [S(temperature=0.3, top_p=0.8, top_k=5, seed=4)]


@pytest.mark.parametrize("value", [None, -1, 1.5, True, "9", [1, None]])
def test_a_wrong_budget_is_named(value):
    with pytest.raises(ValueError, match="max_tokens must be a whole number ≥ 0"):
        budgets_of(value, 1)


def test_wrong_arguments_are_named():
    engine = dp.load(llama(), None)
    with pytest.raises(TypeError, match="stop must be a string or a list of strings; got 5"):
        engine._stops(5)
    with pytest.raises(TypeError, match="sampling must be a SamplingParams, or one for each prompt; got a dict"):
        type(engine)._samplings.__wrapped__(engine, {"temperature": 1}, {}, 1)
    with pytest.raises(ValueError, match=r"max_batch must be a whole number ≥ 1; got 1\.5"):
        Limits.__post_init__(_limits(1.5))
    with pytest.raises(ValueError, match="did you mean 'block'"):
        dp.load(llama(), None, rule="blok")
    for rule in (None, 3):
        with pytest.raises((ValueError, TypeError), match="rule"):
            dp.load(llama(), None, rule=rule)


def _limits(max_batch):
    limits = object.__new__(Limits)
    object.__setattr__(limits, "max_batch", max_batch)
    object.__setattr__(limits, "max_length", None)
    return limits


@pytest.mark.parametrize("beams", [0, -1, 1.5])
def test_a_number_of_beams_that_is_none_is_refused(beams):
    with pytest.raises(ValueError, match="num_beams must be a whole number ≥ 1"):
        check_beams(beams, {})


@pytest.mark.parametrize(
    "option",
    [{"temperature": 0.5}, {"seed": 1}, {"logit_bias": {1: 1.0}}, {"logprobs": True}, {"go_on": lambda: True}],
)
def test_beam_search_refuses_what_it_would_ignore(option):
    with pytest.raises(ValueError, match=f"num_beams=2 is beam search, which does not use {next(iter(option))}"):
        dp.load(llama(), None).generate(list(PROMPT), num_beams=2, max_tokens=3, **option)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("ngramm", "did you mean drafter='ngram'"), ("sufix", "did you mean drafter='suffix'"), ("none", "drafter=None")],
)
def test_a_mistyped_drafter_lists_the_names(name, hint):
    with pytest.raises(ValueError, match=rf"Drafters by name: auto, ngram.*{hint}"):
        dp.load(llama(), name)
