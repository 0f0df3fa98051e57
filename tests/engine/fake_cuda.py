"""A GPU that is not there: tensors that say they lie on it and hold no numbers.

Every operation among them is carried out as far as shapes, types and devices go. So what a real device would refuse is
refused (numbers of the host mixed with its own), what would wait for it is noted (looks, copies that block), and what
it would have said is made up. Kernels and recordings are stood for by the memory they write.
"""

from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import kernels
from draftproof.core import draw as closing
from draftproof.core import rng as rng
from draftproof.core.device import AsyncCopy
from draftproof.core.distribution import DraftVocab
from draftproof.kernels import draw_rows as drawing
from draftproof.models import cuda_graphs as graphs
from engine.fake_indexing import part_of, write

CUDA = torch.device("cuda", 0)


class Elsewhere(TorchDispatchMode):
    """`waits`: what would have waited for the device, by name. `fetches`: numbers asked for in the allowed way."""

    def __init__(self):
        super().__init__()
        self.waits, self.fetches, self.recorded = [], 0, 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        goes_there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        is_there = any(isinstance(part, FakeTensor) for part in args)
        if name == "_to_copy" and goes_there != is_there and ("device" in kwargs):
            self._moved(name, kwargs)
        if name == "copy_" and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            self._moved(name, {"non_blocking": len(args) > 2 and args[2]})
        if name == "_to_copy" and is_there and not goes_there and kwargs.get("device") is not None:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        flat = pytree.tree_leaves((args, kwargs))
        if not goes_there and not any(isinstance(part, FakeTensor) for part in flat):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            self.waits.append(name)
            raise

    def _moved(self, name, kwargs):
        if not kwargs.get("non_blocking"):
            self.waits.append(name)

    def watch(self, monkeypatch):
        """Stand for what only a GPU can do."""
        to = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **more: self._to(to, tensor, args, more))
        whole = torch.Tensor.contiguous
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda x, **how: _whole(x) if x.is_cuda else whole(x, **how))
        tensor = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda numbers, **how: self._tensor(tensor, numbers, how))
        invert = torch.Tensor.__invert__
        monkeypatch.setattr(torch.Tensor, "__invert__", lambda x: torch.bitwise_not(x) if x.is_cuda else invert(x))
        copy = torch.Tensor.copy_
        monkeypatch.setattr(
            torch.Tensor,
            "copy_",
            lambda x, new, non_blocking=False: (
                torch.ops.aten.copy_(x, new, non_blocking) if x.is_cuda or new.is_cuda else copy(x, new, non_blocking)
            ),
        )
        get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__
        monkeypatch.setattr(torch.Tensor, "__getitem__", lambda x, at: part_of(x, at) if x.is_cuda else get(x, at))
        monkeypatch.setattr(
            torch.Tensor, "__setitem__", lambda x, at, new: write(x, at, new) if x.is_cuda else put(x, at, new)
        )
        monkeypatch.setattr(AsyncCopy, "__init__", lambda fetch, tensor: self._fetch(fetch, tensor))
        monkeypatch.setattr(AsyncCopy, "read", lambda fetch: fetch.numbers)
        monkeypatch.setattr(DraftVocab, "of", _vocab)  # made once, when a drafter is: it may look
        for look in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, look, self._look(look, getattr(torch.Tensor, look)))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(graphs, "watched", nullcontext)
        monkeypatch.setattr(kernels, "verify_rows", _verified)
        monkeypatch.setattr(drawing, "draw_rows", _drawn)
        monkeypatch.setattr(graphs, "captured", self._captured)

    def _to(self, to, tensor, args, more):
        """`Tensor.to` looks for the device's driver before it asks any mode."""
        device, dtype, blocking = _asked(args, more)
        if device is None or device.type != "cuda":
            return to(tensor, *args, **more)
        if tensor.device.type == "cuda" and dtype in (None, tensor.dtype):
            return tensor
        return torch.ops.aten._to_copy(tensor, device=CUDA, dtype=dtype, non_blocking=blocking)

    def _tensor(self, tensor, numbers, how):
        device = how.pop("device", None)
        made = tensor(numbers, **how)
        return made if device is None else made.to(device)

    def _look(self, name, original):
        def look(tensor):
            if not tensor.is_cuda:
                return original(tensor)
            self.waits.append(name)
            return original(torch.zeros(tensor.shape, dtype=tensor.dtype))

        return look

    def _fetch(self, fetch, tensor):
        self.fetches += 1
        assert tensor.is_cuda
        fetch.numbers = np.ones(tensor.shape, dtype=np.int64)

    def _captured(self, run, kept, device):
        self.recorded += 1
        assert device.type == "cuda"
        return _Graph(), run()


def _vocab(ids, V):
    return DraftVocab(ids, torch.empty(V, dtype=torch.long, device=ids.device))


def _whole(tensor):
    return torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


class _Graph(torch.cuda.CUDAGraph):
    def __new__(cls):
        return object.__new__(cls)

    def __init__(self):
        pass

    def replay(self):
        pass


def _asked(args, more):
    device, dtype = more.get("device"), more.get("dtype")
    for part in args:
        if isinstance(part, torch.dtype):
            dtype = part
        elif isinstance(part, (str, torch.device)):
            device = part
        elif isinstance(part, torch.Tensor):
            device, dtype = part.device, part.dtype
    return None if device is None else torch.device(device), dtype, bool(more.get("non_blocking"))


def _verified(logits, drafted, draft_logits=None, **given):
    call = {name: given[name] for name in given if name not in ("parameters", "rule")}
    tensors = [logits, drafted, draft_logits, given["parameters"].floats, given["parameters"].ints]
    tensors += [value for value in call.values() if isinstance(value, torch.Tensor)]
    assert all(tensor is None or tensor.is_cuda for tensor in tensors)
    B, K = drafted.shape
    assert logits.shape[:2] == (B, K + 1)
    return kernels.Rows(
        torch.empty((B, K + 1), dtype=torch.long, device=CUDA),
        torch.empty(B, dtype=torch.long, device=CUDA),
        torch.empty(B, dtype=torch.int32, device=CUDA),
    )


def _drawn(logits, parameters, j, *, shared, workspace):
    assert logits.is_cuda
    assert parameters.floats.is_cuda
    tokens = torch.empty(len(logits), dtype=torch.long, device=CUDA)
    return drawing.Drawn(tokens, *torch.empty((3, len(logits)), dtype=torch.float64, device=CUDA))


@contextmanager
def there(monkeypatch):
    """A device that is watched while one is inside."""
    mode = Elsewhere()
    mode.watch(monkeypatch)
    with mode.fake, mode:
        rng._constants(CUDA)  # sent once
        yield mode
    monkeypatch.undo()
    for remembered in (rng._constants, closing._addresses):
        remembered.cache_clear()


def moved(module):
    """A module of ours with its weights there."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(_there(weight), requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = _there(buffer)
    return module


def _there(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
