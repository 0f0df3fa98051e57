"""CUDA graphs without a GPU: a replay runs the captured pass again, on the memory it was captured with.

It finds what a real replay would get wrong: a result that the next replay overwrites, and memory that is not the
captured one any more, as when a tensor was rebound instead of written to, or a buffer was replaced.
"""

from contextlib import nullcontext

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.core import device as core_device
from draftproof.core.device import AsyncCopy
from draftproof.kernels import attention
from draftproof.kernels.attention_reference import decode_attention_reference
from draftproof.models import compatibility, hf
from draftproof.models import cuda_graphs as graphs
from draftproof.models.fused import Fusion
from engine.reference_kernels import install_round_steps


class MemoryTrace(TorchDispatchMode):
    """Records in `outside` the addresses of memory that operations use and that existed before.

    `undo` gives that memory the values it had.
    """

    def __init__(self):
        super().__init__()
        self.outside, self._inside, self._before = set(), set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and not _addresses(value) & (self._inside | self._before.keys()):
                whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
                self._before |= {address: (whole, whole.clone()) for address in _addresses(value)}
        made = func(*args, **(kwargs or {}))
        self.outside |= _addresses((args, kwargs)) - self._inside
        self._inside |= _addresses(made) - self.outside
        return made

    def undo(self):
        for memory, before in self._before.values():
            memory.copy_(before)


def _addresses(tree):
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


class FakeGraph(torch.cuda.CUDAGraph):
    """A CUDA graph that runs its pass again on every replay."""

    def __new__(cls, run):
        return object.__new__(cls)

    def __init__(self, run):
        self._run = run
        with MemoryTrace() as trace:
            self.outputs = tuple(output.clone() for output in run())
        trace.undo()  # a capture runs nothing
        self._memory = trace.outside

    def replay(self):
        with MemoryTrace() as trace:
            made = self._run()
        assert trace.outside == self._memory, "a replay reads and writes the recorded memory, and no other"
        for output, new in zip(self.outputs, made, strict=True):
            output.copy_(new)


def reference_attention(*tensors, capacity=None, ancestors=None, **options):
    """Attend as the kernel does, in plain torch: its interpreter would be slow."""
    if ancestors is not None and ancestors.dtype != torch.bool:
        T = tensors[0].shape[1]
        ancestors = (ancestors[..., None] >> torch.arange(T)) & 1 == 1
    return decode_attention_reference(*tensors, ancestors=ancestors, **options)


class FakeGraphs:
    """Replaces graph capture, and counts how many passes were `recorded` and how often they were `replayed`.

    pooled  rows lie in a pool; else passes are rectangular, as without Triton
    """

    def __init__(self, monkeypatch, *, pooled=True):
        self.recorded, self.replayed = 0, 0
        replay = FakeGraph.replay

        def counted(graph):
            self.replayed += 1
            replay(graph)

        monkeypatch.setattr(FakeGraph, "replay", counted)
        monkeypatch.setattr(graphs, "capture", self._capture)
        monkeypatch.setattr(graphs, "sync_warnings", nullcontext)
        monkeypatch.setattr(graphs, "capturable", lambda tokens: tokens.shape[1] <= graphs.WIDEST)
        copy = AsyncCopy.__init__
        monkeypatch.setattr(AsyncCopy, "__init__", lambda self, tensor: copy(self, tensor.clone()))
        monkeypatch.setattr(core_device, "HOST", "none")
        monkeypatch.setattr(compatibility, "runs_kernels", lambda device: pooled)
        # Found once for each model, which may have been made before.
        refusal = property(lambda model: compatibility.packing_refusal(model._net))
        monkeypatch.setattr(hf.HFModel, "packing_refusal", refusal)
        monkeypatch.setattr(attention, "decode_attention", reference_attention)
        install_round_steps(monkeypatch)
        monkeypatch.setattr(
            hf, "fuse", lambda model, positions: Fusion()
        )  # interpreted kernels are slow; see test_fused.py

    def _capture(self, run, kept, device):
        self.recorded += 1
        graph = FakeGraph(run)
        return graph, graph.outputs
