"""Training steps change the head and its average; a run resumed from a checkpoint continues identically."""

import copy
from itertools import islice

import pytest
import torch

from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import shape_for
from draftproof.train.config import TrainingSchedule
from draftproof.train.generate import Texts
from draftproof.train.report import step_ms
from draftproof.train.target import TargetSignals
from draftproof.train.trainer import (
    MAX_AVERAGE_DECAY,
    HeadTrainer,
    RunningMetrics,
    average_decay,
    batch_rows,
    new_head,
    step_bytes,
)
from draftproof.train.unroll import unroll
from train.tiny_target import tiny_llama


def trainer_and_batch(depth=2):
    model = tiny_llama()
    signals = TargetSignals(model, shape_for(model).taps, torch.arange(100))
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (4, 24), dtype=torch.int32, generator=numbers)
    batch = signals.batch(Texts(tokens, torch.ones_like(tokens, dtype=torch.bool)), depth)
    return HeadTrainer(new_head(model, 0), signals.rows, TrainingSchedule(depth, 4, 0.01)), batch


def weights(head):
    return torch.cat([weight.detach().flatten() for weight in head.parameters()])


def train_steps(trainer, batch, steps, progress=0.5):
    for _ in range(steps):
        trainer.train_step(batch, progress, RunningMetrics.zeros(trainer.schedule.depth, trainer.device))


def test_the_average_follows_the_steps_and_forgets_faster_at_first():
    trainer, batch = trainer_and_batch()
    wanted = weights(trainer.head)
    for step in range(12):
        train_steps(trainer, batch, 1)
        kept = (1 + step) / (10 + step)
        wanted = kept * wanted + (1 - kept) * weights(trainer.head)
    torch.testing.assert_close(weights(trainer.average), wanted, rtol=1e-4, atol=1e-6)
    assert (wanted - weights(trainer.head)).abs().max() > 1e-4
    assert not any(weight.requires_grad for weight in trainer.average.parameters())


def test_the_average_never_keeps_more_than_it_should():
    assert average_decay(0) == pytest.approx(0.1)
    assert average_decay(100) < average_decay(1_000) < average_decay(10**6) == MAX_AVERAGE_DECAY


def test_metrics_are_means_over_batches():
    metrics = RunningMetrics.zeros(3, torch.device("cpu"))
    metrics.add(torch.tensor(1.0), [torch.tensor([0.2, 0.4])])
    metrics.add(torch.tensor(2.0), [torch.tensor([0.6, 0.4]), torch.tensor([0.1, 0.1])])
    loss, accepted = metrics.read()
    assert loss == 1.5
    assert accepted == pytest.approx([0.4, 0.1])


def test_training_resumes_from_a_checkpoint_as_if_never_interrupted(tmp_path):
    trainer, batch = trainer_and_batch()
    train_steps(trainer, batch, 3)
    trainer.save(tmp_path / "checkpoint.pt", began=1.0)
    again, _ = trainer_and_batch()
    assert again.restore(tmp_path / "checkpoint.pt") == {"began": 1.0}
    for each in (trainer, again):
        train_steps(each, batch, 2)
    assert torch.equal(weights(trainer.head), weights(again.head))
    assert torch.equal(weights(trainer.average), weights(again.average))


def test_training_lowers_the_loss():
    trainer, batch = trainer_and_batch()
    before, after = (RunningMetrics.zeros(2, trainer.device) for _ in range(2))
    copy.deepcopy(trainer).train_step(batch, 0.5, before)
    train_steps(trainer, batch, 30)
    trainer.train_step(batch, 0.5, after)
    assert after.read()[0] < before.read()[0] - 0.1


def test_batches_resume_where_they_were_and_every_epoch_has_all_texts():
    every = list(islice(batch_rows(11, 3, 0, 0), 9))
    assert all(len(rows) == 3 for rows in every)
    for epoch in range(3):
        assert len(set(torch.cat(every[3 * epoch : 3 * epoch + 3]).tolist())) == 9
    assert not torch.equal(every[0], every[3])
    for first in (2, 3, 7):
        for rows, wanted in zip(batch_rows(11, 3, 0, first), every[first:], strict=False):
            assert torch.equal(rows, wanted)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_step_keeps_no_more_than_estimated(depth, length):
    """Autograd keeps less than the estimate, in a GPU's precision, but not many times less: the cache gets the rest."""
    shape = HeadShape(128, 4, 2, 32, 384, 10_000.0, 1e-5, (1, 2, 3))
    head, kept = Head(shape), {}
    own = {weight.untyped_storage().data_ptr() for weight in head.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    states = [torch.zeros(2, length, 128, dtype=torch.bfloat16) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        outs = unroll(head, torch.zeros(2, length, 128), states, depth)
    estimate = step_bytes(shape, TrainingSchedule(depth, 2), length)
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    assert len(outs) == depth
    assert estimate / 6 < found < estimate


def test_step_times_are_reported_by_kind():
    history = [{"accepted": [0.1], "step_ms": ms} for ms in (30.0, 5.0, 7.0)] + [
        {"accepted": [0.1, 0.2], "step_ms": 20.0}
    ]
    assert step_ms(history) == {"single": 7.0, "unrolled": 20.0}
