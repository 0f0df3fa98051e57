"""Batches from cached states equal those of a new target pass; targets whose states do not suffice are not cached."""

import copy

import pytest
import torch
import transformers as tf

from draftproof.train.generate import Texts
from draftproof.train.target import SignalCache, TargetSignals
from train.tiny_target import tiny_llama

IDS = torch.tensor([7, 3, 200, 11, 50])
ROWS, LENGTH = 12, 20


def texts():
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (ROWS, LENGTH), dtype=torch.int32, generator=numbers)
    return Texts(tokens, torch.rand(ROWS, LENGTH, generator=numbers) < 0.5)


class Counted(TargetSignals):
    """Counts the texts that the target is run on."""

    run = 0

    def states(self, texts):
        self.run += len(texts)
        return super().states(texts)


def dist(batch):
    return (batch.scores - batch.lse[:, None]).exp()


def assert_same(batch, wanted):
    for name in ("embedded", "at", "best"):
        assert torch.equal(getattr(batch, name), getattr(wanted, name)), name
    torch.testing.assert_close(dist(batch), dist(wanted), rtol=1e-5, atol=1e-6)
    for got, state in zip(batch.states, wanted.states, strict=True):
        torch.testing.assert_close(got, state, rtol=1e-5, atol=1e-5)


def bytes_of(count):
    """Return the bytes of this many texts: per position, two taps of 32 numbers, the lse and the likeliest token."""
    return count * LENGTH * (2 * 32 * 4 + 4 + 4)


@pytest.mark.parametrize("room", [0, 5, ROWS])
def test_a_text_is_run_once_if_there_is_room_and_the_batch_is_the_same(room):
    some, signals = texts(), Counted(tiny_llama(), (1, 3), IDS)
    cache = SignalCache(signals, some, bytes_of(room))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for rows in order.split(4):
        cache.batch(rows, 2)
    assert signals.run == ROWS
    assert cache.cached_texts == room
    for rows in order.flip(0).split(4):
        known = rows < room
        wanted = signals.batch(some.select(torch.cat([rows[known], rows[~known]])), 2)
        assert_same(cache.batch(rows, 2), wanted)
    assert signals.run == ROWS + ROWS + (ROWS - room)  # once for the comparison, plus the texts that did not fit


def test_batches_are_those_of_the_requested_texts():
    """A control: the cached states of another text fail the comparison."""
    some, signals = texts(), TargetSignals(tiny_llama(), (1, 3), IDS)
    cache = SignalCache(signals, some, bytes_of(ROWS))
    for rows in torch.arange(ROWS).split(4):
        cache.batch(rows, 0)
    with pytest.raises(AssertionError):
        assert_same(cache.batch(torch.tensor([1, 2]), 0), signals.batch(some.select(torch.tensor([1, 3])), 0))


def capped(cap=2.0):
    torch.manual_seed(0)
    config = tf.Gemma2Config(
        vocab_size=320, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, head_dim=8,
        intermediate_size=48, final_logit_softcapping=cap, initializer_range=0.5,
    )  # fmt: skip
    return tf.Gemma2ForCausalLM(config).eval()


def scaled():
    torch.manual_seed(0)
    config = tf.GraniteConfig(
        vocab_size=320, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        intermediate_size=48, logits_scaling=4.0,
    )  # fmt: skip
    return tf.GraniteForCausalLM(config).eval()


def biased():
    model = copy.deepcopy(tiny_llama())
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, model.config.vocab_size))
    return model


@pytest.mark.parametrize("make", [capped, scaled, biased])
def test_a_target_whose_states_do_not_give_its_logits_is_run_each_time(make):
    model, some = make(), texts()
    signals = TargetSignals(model, (1, 3), IDS)
    assert not signals.states_give_logits
    cache = SignalCache(signals, some, bytes_of(ROWS))
    rows = torch.arange(4)
    with torch.no_grad():
        logits = model(some.tokens[:4].long()).logits
    for _ in range(2):
        batch = cache.batch(rows, 2)
        at = batch.at + 2 * (batch.at // (LENGTH - 2)) + 1
        torch.testing.assert_close(dist(batch), logits.flatten(0, 1)[at].softmax(-1)[:, IDS], rtol=1e-5, atol=1e-6)
    assert cache.cached_texts == 0


def test_a_cap_on_the_likeliest_logits_only_is_detected():
    """Most logits are unchanged; the largest, which make the distribution, are not."""
    model = capped(30.0)
    with torch.no_grad():
        model.lm_head.weight *= 5 / model(torch.arange(64).view(4, 16)).logits.std()
    assert not TargetSignals(model, (1, 3), torch.arange(320)).states_give_logits
    model.config.final_logit_softcapping = None
    assert TargetSignals(model, (1, 3), torch.arange(320)).states_give_logits


def test_a_tap_before_the_last_layer_does_not_give_the_logits():
    assert not TargetSignals(tiny_llama(), (1, 2), IDS).states_give_logits
    assert TargetSignals(tiny_llama(), (1, 3), IDS).states_give_logits


def test_in_half_precision_states_still_give_the_logits():
    assert TargetSignals(copy.deepcopy(tiny_llama()).to(torch.bfloat16), (1, 3), torch.arange(300)).states_give_logits
