"""The end of a text does not depend on its rounds: budgets, end tokens, stop strings, the context length."""

import pytest

import draftproof as dp
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.models.toy import Toy
from engine.scripted import ScriptedDrafter, cycle
from engine.tiny import PROMPT, llama, neighbour
from models.tiny_tokenizers import byte_level

ROUND = [1, 2, 3, 4, 5]
TEXT = ROUND * 12
every_length = pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 7, 11])


def scripted_engine(k: int, **options) -> Engine:
    """Make an engine that emits TEXT and drafts it k tokens at a time: every draft is accepted whole."""
    return Engine(cycle(*ROUND), None, ScriptedDrafter(TEXT), num_draft_tokens=k, **options)


def test_drafts_are_accepted_whole():
    """The tests below really cut inside the tokens of one round."""
    output = scripted_engine(4).generate([1, 2], max_tokens=20)
    assert output.stats.accepted == output.stats.drafted > 0
    assert output.stats.rounds == 4


@every_length
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9])
def test_a_budget_is_used_up_and_never_overrun(budget, k):
    engine = scripted_engine(k)
    output = engine.generate([1, 2], max_tokens=budget)
    assert output.tokens == TEXT[2 : 2 + budget]
    assert output.finish_reason == "length"
    assert all(emitted + asked < budget for emitted, asked in engine.drafter.asked), "drafted past the budget"


def test_no_round_runs_for_a_budget_of_zero():
    output = scripted_engine(3).generate([1, 2], max_tokens=0)
    assert (output.tokens, output.text, output.stats.rounds) == ([], "", 0)


def test_every_prompt_has_a_budget_of_its_own():
    outputs = scripted_engine(3).generate([[1, 2], [1, 2], [1, 2]], max_tokens=[0, 5, 2])
    assert [output.tokens for output in outputs] == [TEXT[2 : 2 + n] for n in (0, 5, 2)]


@every_length
def test_an_end_token_inside_an_accepted_draft_ends_the_text(k):
    output = scripted_engine(k, eos={5}).generate([1, 2], max_tokens=20)
    assert output.tokens == [3, 4, 5]
    assert output.finish_reason == "stop"


@every_length
@pytest.mark.parametrize("eos", [{5, 4}, {0, 4}, {4, 7, 1}])
def test_of_several_end_tokens_the_first_that_comes_ends_the_text(eos, k):
    output = scripted_engine(k, eos=eos).generate([1, 2], max_tokens=20)
    assert output.tokens == [3, 4]


@every_length
def test_an_end_token_at_the_end_of_the_budget_is_a_stop(k):
    output = scripted_engine(k, eos={5}).generate([1, 2], max_tokens=3)
    assert (output.tokens, output.finish_reason) == ([3, 4, 5], "stop")


def test_an_end_token_in_the_prompt_ends_nothing():
    assert scripted_engine(3, eos={1}).generate([1, 2], max_tokens=9).tokens == [3, 4, 5, 1]


@every_length
def test_a_full_context_ends_the_text(k):
    output = scripted_engine(k, limits=Limits(max_length=9)).generate([1, 2], max_tokens=20)
    assert (output.tokens, output.finish_reason) == (TEXT[2:9], "length")


@pytest.mark.parametrize("drafter", ["ngram", "prompt-lookup", "early-exit:1", "model"])
def test_the_models_own_last_position_ends_the_text(drafter):
    """Rows of different lengths: full rows finish, and the others continue to the end."""
    model = llama(max_length=16)
    made = neighbour() if drafter == "model" else drafter
    engine = dp.load(model, made, num_draft_tokens=5)
    outputs = engine.generate([list(PROMPT), [1], [2, 3, 2, 3]], max_tokens=40, seed=1)
    assert [len(output.tokens) for output in outputs] == [16 - len(PROMPT), 15, 12]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ValueError, match="the prompt has 9 tokens; the model has room for fewer than 9"):
        scripted_engine(2, limits=Limits(max_length=9)).generate(TEXT[:9])


# ---------------------------------------------------------------------------------------------- stop strings

WORDS = byte_level()
A, B, C = (WORDS.encode(letter)[0] for letter in "abc")


def abc(k: int, eos=()) -> Engine:
    """Make an engine that emits abcabcabc…, one token per letter."""
    model = cycle(A, B, C, vocab_size=len(WORDS))
    return Engine(model, WORDS, ScriptedDrafter([A, B, C] * 20), num_draft_tokens=k, eos=eos)


@every_length
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("ca", "ab", 4), ("cab", "ab", 5), ("abc", "", 3), (["bca", "zz"], "a", 4), (["cabca", "ca"], "ab", 4)],
)
def test_a_stop_string_is_found_across_the_borders_of_rounds(stop, text, tokens, k):
    output = abc(k).generate([C], stop=stop, max_tokens=15)
    assert (output.text, len(output.tokens), output.finish_reason) == (text, tokens, "stop")


@every_length
def test_text_that_might_have_become_a_stop_string_is_not_lost(k):
    assert abc(k).generate([C], stop="caz", max_tokens=7).text == "abcabca"
    assert "".join(chunk.text for chunk in abc(k).stream([C], stop="caz", max_tokens=7)) == "abcabca"


def test_what_a_stream_shows_is_what_generate_gives():
    whole = abc(3).generate([C], stop="bcab", max_tokens=15)
    chunks = list(abc(3).stream([C], stop="bcab", max_tokens=15))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        scripted_engine(2).generate([1], stop="x")


@pytest.mark.parametrize(("prompt", "tokens"), [("", WORDS), ([[]], WORDS)])
def test_an_empty_prompt_begins_with_the_tokenizers_own_first_token(prompt, tokens):
    start = tokens.bos_token_id
    table = Toy.random(len(tokens), seed=3).table
    engine = Engine(Toy(table), tokens, None)
    made = engine.generate(prompt, temperature=0, max_tokens=3, chat=False)
    output = made if isinstance(prompt, str) else made[0]
    assert output.tokens == engine.generate([start], temperature=0, max_tokens=3).tokens
    assert output.tokens[0] == int(table[start].argmax())


def test_an_empty_prompt_with_nothing_to_begin_with_is_refused():
    [output] = scripted_engine(2).generate([[]])
    assert output.finish_reason == "error"
    assert output.error.startswith("prompt 0: the prompt is empty")
