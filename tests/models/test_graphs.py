"""When a pass is recorded, and what happens where it cannot be. Replays themselves: tests/engine/test_cuda.py."""

import pytest
import torch

from draftproof.models import graphs
from draftproof.models.graphs import TIMES, Recorder, Recording, Recordings


class Tape(torch.cuda.CUDAGraph):
    """Stands for a CUDA graph: replaying runs the body again, on the memory it was recorded with."""

    def __new__(cls, again):
        return object.__new__(cls)

    def __init__(self, again):
        self.again = again

    def replay(self):
        self.again()


def body(tokens, lengths):
    return (tokens + lengths[:, None])[..., None].float()


@pytest.fixture
def recorded(monkeypatch):
    """The shapes that were recorded, in order; replaying runs the body on the recorded memory."""
    shapes = []

    def record(self, run, tokens, lengths, reach, kept):
        shapes.append((tokens.shape[1], reach))
        tokens, lengths = tokens.clone(), lengths.clone()
        logits = run(tokens, lengths)
        graph = Tape(lambda: logits.copy_(run(tokens, lengths)))
        return Recording(reach, graph, tokens, lengths, logits)

    monkeypatch.setattr(graphs.Recorder, "_record", record)
    return shapes


def passes(recorder, kept, width, reach, times):
    for n in range(times):
        tokens, lengths = torch.arange(2 * width).view(2, width) + n, torch.tensor([5, 7]) + n
        assert torch.equal(recorder.run(body, tokens, lengths, reach, kept), body(tokens, lengths))


def test_a_shape_is_recorded_when_it_has_come_often_enough(recorded):
    recorder, kept = Recorder(), Recordings()
    passes(recorder, kept, 3, 256, TIMES)
    assert not recorded
    passes(recorder, kept, 3, 256, 5)
    passes(recorder, kept, 4, 256, TIMES + 2)
    passes(recorder, kept, 3, 512, TIMES + 2)
    assert recorded == [(3, 256), (4, 256), (3, 512)]


def test_what_was_recorded_is_forgotten_with_its_buffers(recorded):
    recorder, kept = Recorder(), Recordings()
    passes(recorder, kept, 3, 256, TIMES + 1)
    kept.pool = object()
    kept.forget()
    assert kept.pool is None
    passes(recorder, kept, 3, 256, 1)
    assert recorded == [(3, 256), (3, 256)]


def test_a_replay_does_not_write_over_what_it_gave_before(recorded):
    recorder, kept = Recorder(), Recordings()
    passes(recorder, kept, 2, 256, TIMES + 1)
    tokens, lengths = torch.ones((2, 2), dtype=torch.long), torch.tensor([3, 4])
    one = recorder.run(body, tokens, lengths, 256, kept)
    recorder.run(body, tokens + 9, lengths, 256, kept)
    assert torch.equal(one, body(tokens, lengths))


@pytest.mark.skipif(torch.cuda.is_available(), reason="recording fails only where there is no GPU")
def test_where_recording_fails_passes_go_on_and_say_why():
    recorder, kept = Recorder(), Recordings()
    passes(recorder, kept, 3, 256, TIMES)
    with pytest.warns(UserWarning, match="passes are launched one kernel at a time, as recording failed"):
        passes(recorder, kept, 3, 256, 1)
    assert recorder.refusal is not None
    passes(recorder, kept, 3, 256, 3)


def test_recording_can_be_switched_off(recorded):
    passes(Recorder("switched off"), Recordings(), 3, 256, TIMES + 3)
    assert not recorded
