"""Counts how often the host would wait for a device, on a machine that has none.

Everything runs on the CPU, told that it is elsewhere: `is_cpu` says no, kernels run in Triton's interpreter. A
look at a tensor (`bool`, `int`, `tolist`, `nonzero`, indexing by a mask) is then a wait wherever it stands; numbers
that lie on the host are looked at through numpy, which a tensor on a GPU refuses, and are not counted.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import kernels
from draftproof.core import device as core_device
from draftproof.core.device import AsyncCopy
from draftproof.kernels import draw_rows as drawing

LOOKS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal", "item"}


class Waits(TorchDispatchMode):
    """`looks` at tensors, by name, and `waits` for numbers that were fetched."""

    def __init__(self):
        super().__init__()
        self.looks, self.waits, self._paused = [], 0, False
        self._asked = self._heard = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not self._paused and (name in LOOKS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1]))):
            self.looks.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self):
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def watch(self, monkeypatch):
        """Put everything elsewhere, and watch."""
        monkeypatch.setattr(core_device, "HOST", "none")
        monkeypatch.setattr(kernels, "runs_on", lambda device: True)
        monkeypatch.setattr(AsyncCopy, "__init__", lambda fetch, tensor: self._fetch(fetch, tensor))
        monkeypatch.setattr(AsyncCopy, "read", lambda fetch: self._read(fetch))
        monkeypatch.setattr(torch.Tensor, "tolist", self._tolist(torch.Tensor.tolist))
        monkeypatch.setattr(kernels, "verify_rows", self._unwatched(kernels.verify_rows))
        monkeypatch.setattr(drawing, "draw_rows", self._unwatched(drawing.draw_rows))

    def _unwatched(self, launched):
        """The interpreter looks at everything, a GPU at nothing."""

        def launch(*args, **more):
            with self.paused():
                return launched(*args, **more)

        return launch

    def _fetch(self, fetch, tensor):
        self._asked += 1
        fetch.numbers, fetch.ticket = tensor, self._asked

    def _read(self, fetch):
        """Who has waited for a later number has this one too: the device works in order."""
        self.waits += fetch.ticket > self._heard
        self._heard = max(self._heard, fetch.ticket)
        return fetch.numbers.numpy()

    def _tolist(self, original):
        def tolist(tensor):
            if not self._paused:
                self.looks.append("tolist")
            return original(tensor)

        return tolist


def _by_mask(indices):
    return any(i is not None and i.dtype == torch.bool for i in indices)
