"""Texts generated in a batch follow the target, change turns at the right place, and mark the answers."""

import random

import pytest
import torch

from draftproof.train.chat_template import turns_of
from draftproof.train.data import text_starts
from draftproof.train.generate import Start, generate_texts, sample_tokens
from g_test import g_test
from models.tiny_tokenizers import byte_level
from train.tiny_target import tiny_llama

ALPHA = 1e-6


@pytest.fixture(scope="module")
def texts():
    turns, tokenizer = turns_of(byte_level()), byte_level()
    begun = (
        text_starts(turns, tokenizer, 12, random.Random(0)) + [Start(turns.opening + turns.to_assistant, True, 0.0)] * 4
    )
    ends = [tokenizer.eos_token_id]
    return generate_texts(tiny_llama(), turns, begun, 120, torch.Generator().manual_seed(0), ends=ends), begun


def test_greedy_rows_are_the_argmax_of_a_plain_forward(texts):
    made, begun = texts
    with torch.no_grad():
        best = tiny_llama()(made.tokens.long()).logits.argmax(-1)
    cold = torch.tensor([start.temperature == 0 for start in begun])
    wanted = made.is_answer[cold][:, 1:]
    assert wanted.sum() > 50
    assert torch.equal(made.tokens[cold][:, 1:][wanted].long(), best[cold][:, :-1][wanted])


def test_after_an_end_come_the_tokens_of_the_template(texts):
    made, begun = texts
    turns, changes = turns_of(byte_level()), 0
    for row, start in enumerate(begun):
        tokens, is_answer = made.tokens[row].tolist(), made.is_answer[row]
        for at in range(len(start.tokens), len(tokens) - 8):
            if tokens[at] == turns.to_user[0] and is_answer[at]:
                assert tuple(tokens[at : at + len(turns.to_user)]) == turns.to_user
                assert not is_answer[at + 1 : at + len(turns.to_user)].any()
                changes += 1
    assert changes > 3


def test_beginnings_are_kept_and_not_marked_as_answers(texts):
    made, begun = texts
    for row, start in enumerate(begun):
        assert tuple(made.tokens[row, : len(start.tokens)].tolist()) == start.tokens
        assert not made.is_answer[row, : len(start.tokens)].any()


def test_the_clock_may_cut_all_texts_short():
    turns = turns_of(byte_level())
    made = generate_texts(
        tiny_llama(),
        turns,
        [Start((5,), True, 1.0)] * 2,
        200,
        torch.Generator().manual_seed(0),
        go_on=lambda at: at < 40,
    )
    assert made.tokens.shape == made.is_answer.shape == (2, 48)


@pytest.mark.statistical
def test_draws_follow_the_distribution():
    """α = 1e-6; 40 000 draws detect a bias of 0.02 in one token's share. Another temperature must fail."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).expand(40_000, 5)
    made = sample_tokens(logits, torch.ones(40_000), torch.Generator().manual_seed(3))
    seen = torch.bincount(made, minlength=5).double()
    assert g_test(seen, logits[0].double().softmax(-1)) > ALPHA
    assert g_test(seen, (logits[0].double() / 1.1).softmax(-1)) < ALPHA


def test_cool_rows_leave_out_what_is_unlikely():
    logits = torch.tensor([5.0, 4.5, 0.0, 0.0]).expand(2_000, 4)
    made = sample_tokens(logits, torch.full((2_000,), 0.7), torch.Generator().manual_seed(0))
    assert set(made.tolist()) == {0, 1}
    assert set(sample_tokens(logits, torch.zeros(2_000), torch.Generator().manual_seed(0)).tolist()) == {0}
