"""What is remembered of a text is what the target would show again; and what cannot be told from states is not."""

import copy

import pytest
import torch
import transformers as tf

from draftproof.train.generate import Texts
from draftproof.train.target import Notes, TargetSignals
from train.tiny_target import pupil

IDS = torch.tensor([7, 3, 200, 11, 50])
ROWS, LENGTH = 12, 20


def texts():
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (ROWS, LENGTH), dtype=torch.int32, generator=numbers)
    return Texts(tokens, torch.rand(ROWS, LENGTH, generator=numbers) < 0.5)


class Counted(TargetSignals):
    """Counts the texts that it is asked to read."""

    read = 0

    def taught(self, texts):
        self.read += len(texts)
        return super().taught(texts)


def dist(lesson):
    return (lesson.scores - lesson.lse[:, None]).exp()


def assert_same(lesson, wanted):
    for name in ("embedded", "at", "best"):
        assert torch.equal(getattr(lesson, name), getattr(wanted, name)), name
    torch.testing.assert_close(dist(lesson), dist(wanted), rtol=1e-5, atol=1e-6)
    for got, its in zip(lesson.states, wanted.states, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-5, atol=1e-5)


def bytes_of(count):
    """Of so many texts: two taps of 32 numbers, the log-sum-exp and the likeliest token, for each position."""
    return count * LENGTH * (2 * 32 * 4 + 4 + 4)


@pytest.mark.parametrize("room", [0, 5, ROWS])
def test_a_text_is_read_once_if_there_is_room_and_the_lesson_is_the_same(room):
    some, teacher = texts(), Counted(pupil(), (1, 3), IDS)
    notes = Notes(teacher, some, bytes_of(room))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for rows in order.split(4):
        notes.lesson(rows, 2)
    assert teacher.read == ROWS
    assert notes.remembered == room
    for rows in order.flip(0).split(4):
        known = rows < room
        wanted = teacher.lesson(some.of(torch.cat([rows[known], rows[~known]])), 2)
        assert_same(notes.lesson(rows, 2), wanted)
    assert teacher.read == ROWS + ROWS + (ROWS - room)  # once for the comparison, and what found no room


def test_lessons_are_those_of_the_texts_that_were_asked_for():
    """A control: another text's notes would not pass for this one's."""
    some, teacher = texts(), TargetSignals(pupil(), (1, 3), IDS)
    notes = Notes(teacher, some, bytes_of(ROWS))
    for rows in torch.arange(ROWS).split(4):
        notes.lesson(rows, 0)
    with pytest.raises(AssertionError):
        assert_same(notes.lesson(torch.tensor([1, 2]), 0), teacher.lesson(some.of(torch.tensor([1, 3])), 0))


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
    model = copy.deepcopy(pupil())
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, model.config.vocab_size))
    return model


@pytest.mark.parametrize("make", [capped, scaled, biased])
def test_a_target_whose_states_do_not_tell_its_distribution_is_asked_each_time(make):
    model, some = make(), texts()
    teacher = TargetSignals(model, (1, 3), IDS)
    assert not teacher.tells
    notes = Notes(teacher, some, bytes_of(ROWS))
    rows = torch.arange(4)
    with torch.no_grad():
        logits = model(some.tokens[:4].long()).logits
    for _ in range(2):
        lesson = notes.lesson(rows, 2)
        at = lesson.at + 2 * (lesson.at // (LENGTH - 2)) + 1
        torch.testing.assert_close(dist(lesson), logits.flatten(0, 1)[at].softmax(-1)[:, IDS], rtol=1e-5, atol=1e-6)
    assert notes.remembered == 0


def test_a_cap_that_only_likely_tokens_feel_is_felt():
    """Most logits are as they were; the largest, which make the distribution, are not."""
    model = capped(30.0)
    with torch.no_grad():
        model.lm_head.weight *= 5 / model(torch.arange(64).view(4, 16)).logits.std()
    assert not TargetSignals(model, (1, 3), torch.arange(320)).tells
    model.config.final_logit_softcapping = None
    assert TargetSignals(model, (1, 3), torch.arange(320)).tells


def test_a_tap_before_the_end_does_not_tell_the_distribution():
    assert not TargetSignals(pupil(), (1, 2), IDS).tells
    assert TargetSignals(pupil(), (1, 3), IDS).tells


def test_half_precision_still_tells():
    assert TargetSignals(copy.deepcopy(pupil()).to(torch.bfloat16), (1, 3), torch.arange(300)).tells
