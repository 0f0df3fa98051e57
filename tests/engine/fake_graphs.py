"""Recordings without a GPU: replaying runs the recorded pass again, on the memory it was recorded with.

What a replay would get wrong shows: a result that the next replay writes over, and memory that is not the recorded one
any more, as when a tensor was bound anew instead of written to, or a buffer was replaced.
"""

from contextlib import nullcontext

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.core import device as core_device
from draftproof.models import cuda_graphs as graphs


class Touched(TorchDispatchMode):
    """`outside`: addresses of the memory that operations read or write and that was there before."""

    def __init__(self):
        super().__init__()
        self.outside, self._inside = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.outside |= _addresses((args, kwargs)) - self._inside
        self._inside |= _addresses(made) - self.outside
        return made


def _addresses(tree):
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


class Tape(torch.cuda.CUDAGraph):
    """Stands for a CUDA graph."""

    def __new__(cls, run):
        return object.__new__(cls)

    def __init__(self, run):
        self._run = run
        with Touched() as touched:
            self.outputs = tuple(output.clone() for output in run())
        self._memory = touched.outside

    def replay(self):
        with Touched() as touched:
            made = self._run()
        assert touched.outside == self._memory, "a replay reads and writes the recorded memory, and no other"
        for mine, new in zip(self.outputs, made, strict=True):
            mine.copy_(new)


class Tapes:
    """`recorded`: how many passes were; `replayed`: how often."""

    def __init__(self, monkeypatch):
        self.recorded, self.replayed = 0, 0
        replay = Tape.replay

        def counted(tape):
            self.replayed += 1
            replay(tape)

        monkeypatch.setattr(Tape, "replay", counted)
        monkeypatch.setattr(graphs, "captured", self._captured)
        monkeypatch.setattr(graphs, "watched", nullcontext)
        monkeypatch.setattr(graphs, "recordable", lambda tokens: tokens.shape[1] <= graphs.WIDEST)
        monkeypatch.setattr(core_device, "HOST", "none")

    def _captured(self, run, kept, device):
        self.recorded += 1
        tape = Tape(run)
        return tape, tape.outputs
