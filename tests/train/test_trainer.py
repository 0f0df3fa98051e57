"""A step changes the head, its average follows; what was put aside goes on as if it had not been."""

import copy
from itertools import islice

import pytest
import torch

from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import shape_for
from draftproof.train.config import Course
from draftproof.train.generate import Texts
from draftproof.train.report import step_ms
from draftproof.train.target import TargetSignals
from draftproof.train.trainer import MEMORY, Marks, Student, batches, memory, needs, new_head
from draftproof.train.unroll import unroll
from train.tiny_target import pupil


def taught(depth=2):
    model = pupil()
    teacher = TargetSignals(model, shape_for(model).taps, torch.arange(100))
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (4, 24), dtype=torch.int32, generator=numbers)
    lesson = teacher.lesson(Texts(tokens, torch.ones_like(tokens, dtype=torch.bool)), depth)
    return Student(new_head(model, 0), teacher.rows, Course(depth, 4, 0.01)), lesson


def weights(head):
    return torch.cat([weight.detach().flatten() for weight in head.parameters()])


def learn(student, lesson, steps, progress=0.5):
    for _ in range(steps):
        student.learn(lesson, progress, Marks.none(student.course.depth, student.device))


def test_the_average_is_that_of_the_steps_and_younger_at_first():
    student, lesson = taught()
    wanted = weights(student.head)
    for step in range(12):
        learn(student, lesson, 1)
        kept = (1 + step) / (10 + step)
        wanted = kept * wanted + (1 - kept) * weights(student.head)
    torch.testing.assert_close(weights(student.average), wanted, rtol=1e-4, atol=1e-6)
    assert (wanted - weights(student.head)).abs().max() > 1e-4
    assert not any(weight.requires_grad for weight in student.average.parameters())


def test_the_average_never_keeps_more_than_it_should():
    assert memory(0) == pytest.approx(0.1)
    assert memory(100) < memory(1_000) < memory(10**6) == MEMORY


def test_marks_are_means_over_lessons():
    marks = Marks.none(3, torch.device("cpu"))
    marks.note(torch.tensor(1.0), [torch.tensor([0.2, 0.4])])
    marks.note(torch.tensor(2.0), [torch.tensor([0.6, 0.4]), torch.tensor([0.1, 0.1])])
    loss, accepted = marks.read()
    assert loss == 1.5
    assert accepted == pytest.approx([0.4, 0.1])


def test_a_student_goes_on_from_its_checkpoint_as_if_nothing_had_been(tmp_path):
    student, lesson = taught()
    learn(student, lesson, 3)
    student.save(tmp_path / "student.pt", began=1.0)
    again, _ = taught()
    assert again.restore(tmp_path / "student.pt") == {"began": 1.0}
    for each in (student, again):
        learn(each, lesson, 2)
    assert torch.equal(weights(student.head), weights(again.head))
    assert torch.equal(weights(student.average), weights(again.average))


def test_learning_lowers_the_loss_of_what_was_learnt():
    student, lesson = taught()
    before, after = (Marks.none(2, student.device) for _ in range(2))
    copy.deepcopy(student).learn(lesson, 0.5, before)
    learn(student, lesson, 30)
    student.learn(lesson, 0.5, after)
    assert after.read()[0] < before.read()[0] - 0.1


def test_batches_go_on_where_they_were_and_every_epoch_has_all_texts():
    every = list(islice(batches(11, 3, 0, 0), 9))
    assert all(len(rows) == 3 for rows in every)
    for epoch in range(3):
        assert len(set(torch.cat(every[3 * epoch : 3 * epoch + 3]).tolist())) == 9
    assert not torch.equal(every[0], every[3])
    for first in (2, 3, 7):
        for rows, wanted in zip(batches(11, 3, 0, first), every[first:], strict=False):
            assert torch.equal(rows, wanted)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_step_keeps_no_more_than_it_says(depth, length):
    """What autograd keeps, in the precision of a GPU; and not many times less, or there would be no room for notes."""
    shape = HeadShape(128, 4, 2, 32, 384, 10_000.0, 1e-5, (1, 2, 3))
    head, kept = Head(shape), {}
    own = {weight.untyped_storage().data_ptr() for weight in head.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    states = [torch.zeros(2, length, 128, dtype=torch.bfloat16) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        outs = unroll(head, torch.zeros(2, length, 128), states, depth)
    told = needs(shape, Course(depth, 2), length)
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    assert len(outs) == depth
    assert told / 6 < found < told


def test_step_times_are_told_by_kind():
    looks = [{"accepted": [0.1], "step_ms": ms} for ms in (30.0, 5.0, 7.0)] + [
        {"accepted": [0.1, 0.2], "step_ms": 20.0}
    ]
    assert step_ms(looks) == {"single": 7.0, "unrolled": 20.0}
