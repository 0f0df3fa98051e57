"""Count how often the engine would synchronise with a GPU, on a machine without one.

Everything runs on the CPU, but `is_cpu` returns False, and kernels run in Triton's interpreter. Every operation that
reads a tensor's values (`bool`, `int`, `tolist`, `nonzero`, indexing by a mask) then counts as a sync. Values that
really lie on the CPU are read through numpy, which a GPU tensor refuses, and are not counted.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import kernels
from draftproof.core import device as core_device
from draftproof.core.device import AsyncCopy
from draftproof.kernels import attention
from draftproof.kernels import draw_rows as drawing
from draftproof.models import hf
from draftproof.models.fused import Fusion
from engine.fake_graphs import reference_attention
from engine.reference_kernels import install_round_steps

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal", "item"}
"""Operations whose result or shape depends on values, so that the CPU must wait for them."""


class SyncCounter(TorchDispatchMode):
    """Records `reads` of tensor values, by name, and counts `waits` for an `AsyncCopy`."""

    def __init__(self):
        super().__init__()
        self.reads, self.waits, self._paused = [], 0, False
        self._copies = self._arrived = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not self._paused and (name in READS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1]))):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self):
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def install(self, monkeypatch):
        """Make the engine take its GPU paths, and route copies and reads through this counter."""
        monkeypatch.setattr(core_device, "HOST", "none")
        monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(AsyncCopy, "__init__", lambda copy, tensor: self._start_copy(copy, tensor))
        monkeypatch.setattr(AsyncCopy, "read", lambda copy: self._read_copy(copy))
        monkeypatch.setattr(torch.Tensor, "tolist", self._tolist(torch.Tensor.tolist))
        monkeypatch.setattr(kernels, "verify_rows", self._uncounted(kernels.verify_rows))
        monkeypatch.setattr(drawing, "draw_rows", self._uncounted(drawing.draw_rows))
        monkeypatch.setattr(attention, "decode_attention", self._uncounted(reference_attention))
        install_round_steps(monkeypatch)
        monkeypatch.setattr(
            hf, "fuse", lambda model, positions: Fusion()
        )  # interpreted kernels are slow; see test_fused.py

    def _uncounted(self, launched):
        """Stop counting during a kernel: the interpreter reads every value, a GPU none."""

        def launch(*args, **more):
            with self.paused():
                return launched(*args, **more)

        return launch

    def _start_copy(self, copy, tensor):
        self._copies += 1
        copy.numbers, copy.ticket = tensor, self._copies

    def _read_copy(self, copy):
        """Count a wait, unless a later copy was read before: the device works in order."""
        self.waits += copy.ticket > self._arrived
        self._arrived = max(self._arrived, copy.ticket)
        return copy.numbers.numpy()

    def _tolist(self, original):
        def tolist(tensor):
            if not self._paused:
                self.reads.append("tolist")
            return original(tensor)

        return tolist


def _by_mask(indices):
    return any(i is not None and i.dtype == torch.bool for i in indices)
