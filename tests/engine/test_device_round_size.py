"""Around the passes of a round that stays on a GPU few kernels run: each takes microseconds, however little it does.

Operations are counted where a round is recorded; a step that is one kernel counts once, and passes do not count.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import draftproof as dp
from draftproof import kernels
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.kernels import draw_rows as drawing
from draftproof.kernels import round_steps
from draftproof.models import cuda_graphs
from draftproof.models.device_rows import DeviceRows
from draftproof.models.head.rows import HeadRows
from draftproof.models.hf import HFModel
from engine import reference_kernels
from engine.fake_graphs import FakeGraphs
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import on_target

NO_KERNEL = {"view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "t"}
NO_KERNEL |= {"unbind", "split", "alias", "detach", "empty", "new_empty", "empty_like", "as_strided", "lift_fresh"}
NO_KERNEL |= {"flatten", "unflatten", "reshape", "_reshape_alias"}


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name, given = func._schema.name.removeprefix("aten::"), [x for x in args if isinstance(x, torch.Tensor)]
        if name not in NO_KERNEL and not (name in ("to", "_to_copy") and made.dtype == given[0].dtype):
            self.names.append(name)
        return made


@pytest.fixture
def recorded(monkeypatch):
    """Return the operations of each stage that is recorded."""
    reference_kernels.install(monkeypatch)
    FakeGraphs(monkeypatch)
    capture, stages, counters = cuda_graphs.capture, [], []

    def counting(run, kept, device):
        seen = []

        def counted():
            with Counted() as counter:
                counters.append(counter)
                outputs = run()
            counters.pop()
            seen.append(counter.names)
            return outputs

        made = capture(counted, kept, device)
        stages.append(seen[0])
        return made

    def one_kernel(module, name, times):
        launched = getattr(module, name)

        def launch(*args, **more):
            if not counters:
                return launched(*args, **more)
            names, counters[-1].names = counters[-1].names, []
            made = launched(*args, **more)
            counters[-1].names = names + [name] * times
            return made

        monkeypatch.setattr(module, name, launch)

    monkeypatch.setattr(cuda_graphs, "capture", counting)
    for step in ("begin_draft", "describe_draws", "begin_scoring", "conclude"):
        one_kernel(round_steps, step, 1)
    one_kernel(kernels, "verify_rows", 1)
    one_kernel(drawing, "draw_rows", 1)
    for rows, passes in ((DeviceRows, "launch"), (HeadRows, "device_states"), (HeadRows, "logits"), (HeadRows, "fuse")):
        one_kernel(rows, passes, 0)
    return stages


def generate(drafter, k):
    engine = dp.load(llama(), drafter, num_draft_tokens=k, max_batch=1)
    engine.generate([list(PROMPT)], dp.SamplingParams(temperature=0.8, seed=1), max_tokens=20)


def test_a_plain_round(recorded):
    generate(None, 0)
    assert [len(names) for names in recorded] == [4], recorded


def test_a_round_with_a_draft_model(recorded):
    generate(ModelDrafter(HFModel(neighbour()), vocab_size=V), 4)
    draft, score = recorded
    assert len(draft) <= 34, draft
    assert len(score) == 3, score


def test_a_round_with_a_head(recorded):
    generate(HeadDrafter(on_target(6)), 4)
    draft, score = recorded
    assert len(draft) <= 34, draft
    assert len(score) <= 20, score
