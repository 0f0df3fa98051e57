"""When a pass is captured as a CUDA graph, and what happens if not. Real replays: tests/engine/test_cuda.py."""

import gc
import warnings
from contextlib import nullcontext

import pytest
import torch

from draftproof.models import cuda_graphs as graphs
from draftproof.models.cuda_graphs import SWITCHED_OFF, WARMUP_PASSES, CapturedGraphs, GraphCache


class Tape(torch.cuda.CUDAGraph):
    """A fake CUDA graph: replaying runs the body again, on the memory it was recorded with."""

    def __new__(cls, again):
        return object.__new__(cls)

    def __init__(self, again):
        self.again = again

    def replay(self):
        self.again()


def body(tokens, lengths, parents=None):
    logits = (tokens + lengths[:, None])[..., None].float()
    return logits, logits * 2 if parents is None else logits + parents.sum()


@pytest.fixture
def recorded(monkeypatch):
    """Record with fake graphs; return the widths that were recorded, in order."""
    shapes = []

    def capture(run, recordings, device):
        outputs = run()
        shapes.append(outputs[0].shape[1])
        return Tape(lambda: [output.copy_(new) for output, new in zip(outputs, run(), strict=True)]), outputs

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "sync_warnings", nullcontext)
    monkeypatch.setattr(graphs, "capturable", lambda tokens: True)
    return shapes


def passes(recorder, kept, width, reach, times, variant=()):
    for n in range(times):
        inputs = torch.arange(2 * width).view(2, width) + n, torch.tensor([5, 7]) + n
        assert_same(recorder.run(body, inputs, reach, kept, variant), body(*inputs))


def assert_same(made, wanted):
    assert len(made) == len(wanted)
    assert all(map(torch.equal, made, wanted))


def test_a_shape_is_recorded_when_it_has_come_often_enough(recorded):
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 3, 256, WARMUP_PASSES)
    assert not recorded
    passes(recorder, kept, 3, 256, 5)
    passes(recorder, kept, 4, 256, WARMUP_PASSES + 2)
    passes(recorder, kept, 3, 512, WARMUP_PASSES + 2)
    assert recorded == [3, 4, 3]


def test_a_graph_with_a_larger_reach_serves_a_smaller_one(recorded):
    """At a bucket border the reach changes back and forth with every rejection."""
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 3, 512, WARMUP_PASSES + 1)
    passes(recorder, kept, 3, 256, WARMUP_PASSES + 2)
    assert recorded == [3]


def test_what_else_a_pass_depends_on_has_a_recording_of_its_own(recorded):
    recorder, kept = GraphCache(), CapturedGraphs()
    for variant in ((), (1, 2)):
        passes(recorder, kept, 3, 256, WARMUP_PASSES + 2, variant)
    for n in range(WARMUP_PASSES + 2):  # a tree too, by its parents' shape
        inputs = torch.ones((2, 3), dtype=torch.long), torch.tensor([3, 4]), torch.full((2, 2), n)
        assert_same(recorder.run(body, inputs, 256, kept), body(*inputs))
    assert recorded == [3, 3, 3]
    assert len(kept.by_kind) == 3


def test_graphs_are_dropped_with_their_buffers(recorded):
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 3, 256, WARMUP_PASSES + 1)
    kept.pool = object()
    kept.forget()
    assert kept.pool is None
    passes(recorder, kept, 3, 256, 1)
    assert recorded == [3, 3]


def test_a_replay_does_not_overwrite_an_earlier_result(recorded):
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 2, 256, WARMUP_PASSES + 1)
    tokens, lengths = torch.ones((2, 2), dtype=torch.long), torch.tensor([3, 4])
    one = recorder.run(body, (tokens, lengths), 256, kept)
    recorder.run(body, (tokens + 9, lengths), 256, kept)
    assert_same(one, body(tokens, lengths))


def test_a_pass_that_synchronises_is_found_before_it_is_recorded(recorded, monkeypatch):
    """During a capture a sync would be an error from which torch does not recover."""
    monkeypatch.setattr(graphs, "sync_warnings", lambda: nullcontext(["model.py:7"]))
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 3, 256, WARMUP_PASSES - 1)
    with pytest.warns(UserWarning, match=r"cannot be recorded: it synchronises with the device \(model.py:7\)"):
        passes(recorder, kept, 3, 256, 1)
    passes(recorder, kept, 3, 256, WARMUP_PASSES)
    assert not recorded


def test_torch_reports_where_a_pass_synchronises(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found = []

    def rehearse():
        with graphs.sync_warnings() as syncs:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        found.extend(syncs)

    with pytest.warns(UserWarning, match="something else") as others:
        rehearse()
    assert [place.rpartition("/")[2].partition(":")[0] for place in found] == ["test_cuda_graphs.py"]
    assert (modes, len(others)) == (["warn", 0], 1)


def test_no_garbage_is_collected_while_a_pass_is_recorded():
    """It may destroy an older graph, which can invalidate the running capture."""
    with graphs._garbage_collection_off():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="recording fails only where there is no GPU")
def test_if_recording_fails_passes_go_on_with_a_warning(monkeypatch):
    monkeypatch.setattr(graphs, "sync_warnings", nullcontext)
    monkeypatch.setattr(graphs, "capturable", lambda tokens: True)
    recorder, kept = GraphCache(), CapturedGraphs()
    passes(recorder, kept, 3, 256, WARMUP_PASSES)
    with pytest.warns(UserWarning, match="passes are launched one kernel at a time, as they cannot be recorded"):
        passes(recorder, kept, 3, 256, 1)
    assert recorder.refusal is not None
    passes(recorder, kept, 3, 256, 3)


def test_only_short_passes_on_a_gpu_are_recorded():
    assert not graphs.capturable(torch.ones((1, 2), dtype=torch.long))
    kept = CapturedGraphs()
    passes(GraphCache(), kept, 3, 256, WARMUP_PASSES + 2)
    assert not kept.times


def test_recording_can_be_switched_off(recorded):
    passes(GraphCache(SWITCHED_OFF), CapturedGraphs(), 3, 256, WARMUP_PASSES + 3)
    assert not recorded
