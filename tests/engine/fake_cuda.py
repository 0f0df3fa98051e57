"""A fake CUDA device: tensors that claim to lie on a GPU and hold no values.

Operations on them compute shapes, dtypes and devices only. What a real device would refuse is refused (mixing CPU and
GPU tensors), what would synchronise is recorded (reads of values, blocking copies), and values read back are made up.
Kernels and CUDA graphs are replaced by the memory they write.
"""

from contextlib import contextmanager, nullcontext
from importlib import import_module

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
from draftproof.core import rng
from draftproof.core.device import AsyncCopy, Mark
from draftproof.core.distribution import DraftVocab
from draftproof.kernels import attention
from draftproof.kernels import draw_rows as drawing
from draftproof.models import cuda_graphs as graphs
from draftproof.models import hf
from draftproof.models.fused import Fusion
from engine.fake_indexing import get_item, set_item
from engine.reference_kernels import install_round_steps

CUDA = torch.device("cuda", 0)


class FakeCuda(TorchDispatchMode):
    """A dispatch mode that runs operations on fake GPU tensors.

    syncs     operations that would have synchronised, by name
    fetches   copies to the CPU by `AsyncCopy`, the allowed way
    recorded  passes captured as CUDA graphs
    """

    def __init__(self):
        super().__init__()
        self.syncs, self.fetches, self.recorded = [], 0, 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        to_gpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        from_gpu = any(isinstance(part, FakeTensor) for part in args)
        if name == "_to_copy" and to_gpu != from_gpu and ("device" in kwargs):
            self._copied(name, kwargs)
        if name == "copy_" and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            self._copied(name, {"non_blocking": len(args) > 2 and args[2]})
        if name == "_to_copy" and from_gpu and not to_gpu and kwargs.get("device") is not None:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        flat = pytree.tree_leaves((args, kwargs))
        if not to_gpu and not any(isinstance(part, FakeTensor) for part in flat):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            self.syncs.append(name)
            raise

    def _copied(self, name, kwargs):
        if not kwargs.get("non_blocking"):
            self.syncs.append(name)

    def install(self, monkeypatch):
        """Replace what needs a driver before any dispatch mode is asked, and what only a GPU can do."""
        to = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **more: self._to(to, tensor, args, more))
        contiguous = torch.Tensor.contiguous
        monkeypatch.setattr(
            torch.Tensor, "contiguous", lambda x, **options: _contiguous(x) if x.is_cuda else contiguous(x, **options)
        )
        tensor = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda numbers, **options: self._tensor(tensor, numbers, options))
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
        monkeypatch.setattr(torch.Tensor, "__getitem__", lambda x, at: get_item(x, at) if x.is_cuda else get(x, at))
        monkeypatch.setattr(
            torch.Tensor, "__setitem__", lambda x, at, new: set_item(x, at, new) if x.is_cuda else put(x, at, new)
        )
        monkeypatch.setattr(AsyncCopy, "__init__", lambda copy, tensor: self._start_copy(copy, tensor))
        monkeypatch.setattr(AsyncCopy, "read", lambda copy: copy.numbers)
        monkeypatch.setattr(Mark, "__init__", lambda mark, device: None)
        monkeypatch.setattr(Mark, "seconds_until", lambda mark, later: 1e-3)
        monkeypatch.setattr(DraftVocab, "of", _vocab)  # runs once, when a drafter is built: it may synchronise
        for read in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, read, self._read(read, getattr(torch.Tensor, read)))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        # fake weights are a subclass of Tensor, which looks quantised; a probe needs real values
        monkeypatch.setattr(hf, "needs_probe", lambda model, **options: False)
        monkeypatch.setattr(hf, "fuse", lambda model, positions: Fusion())  # compares values
        monkeypatch.setattr(graphs, "sync_warnings", nullcontext)
        monkeypatch.setattr(kernels, "verify_rows", _verify_rows)
        monkeypatch.setattr(drawing, "draw_rows", _draw_rows)
        monkeypatch.setattr(attention, "decode_attention", _decode_attention)
        monkeypatch.setattr(graphs, "capture", self._capture)
        install_round_steps(monkeypatch)

    def _to(self, to, tensor, args, more):
        """Replace `Tensor.to`, which needs the device's driver before it asks any dispatch mode."""
        device, dtype, non_blocking = _to_arguments(args, more)
        if device is None or device.type != "cuda":
            return to(tensor, *args, **more)
        if tensor.device.type == "cuda" and dtype in (None, tensor.dtype):
            return tensor
        return torch.ops.aten._to_copy(tensor, device=CUDA, dtype=dtype, non_blocking=non_blocking)

    def _tensor(self, tensor, numbers, options):
        device = options.pop("device", None)
        made = tensor(numbers, **options)
        return made if device is None else made.to(device)

    def _read(self, name, original):
        def read(tensor):
            if not tensor.is_cuda:
                return original(tensor)
            self.syncs.append(name)
            return original(torch.zeros(tensor.shape, dtype=tensor.dtype))

        return read

    def _start_copy(self, copy, tensor):
        self.fetches += 1
        assert tensor.is_cuda
        copy.numbers = np.ones(tensor.shape, dtype=np.int64)

    def _capture(self, run, kept, device):
        self.recorded += 1
        assert device.type == "cuda"
        return _EmptyGraph(), run()


def _vocab(ids, V):
    return DraftVocab(ids, torch.empty(V, dtype=torch.long, device=ids.device))


def _contiguous(tensor):
    return torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


class _EmptyGraph(torch.cuda.CUDAGraph):
    def __new__(cls):
        return object.__new__(cls)

    def __init__(self):
        pass

    def replay(self):
        pass


def _to_arguments(args, more):
    """Return device, dtype and non_blocking of a call of `Tensor.to`."""
    device, dtype = more.get("device"), more.get("dtype")
    for part in args:
        if isinstance(part, torch.dtype):
            dtype = part
        elif isinstance(part, (str, torch.device)):
            device = part
        elif isinstance(part, torch.Tensor):
            device, dtype = part.device, part.dtype
    return None if device is None else torch.device(device), dtype, bool(more.get("non_blocking"))


def _verify_rows(logits, drafted, draft_logits=None, **given):
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


def _draw_rows(logits, parameters, j, *, shared, workspace):
    assert logits.is_cuda
    assert parameters.floats.is_cuda
    tokens = torch.empty(len(logits), dtype=torch.long, device=CUDA)
    return drawing.Drawn(tokens, *torch.empty((3, len(logits)), dtype=torch.float64, device=CUDA))


def _decode_attention(query, keys, values, starts, lengths, widths=None, *, ancestors=None, positions=None, **options):
    tensors = [query, keys, values, starts, lengths, widths, ancestors, positions]
    assert all(tensor is None or tensor.is_cuda for tensor in tensors)
    return torch.empty((*query.shape[:3], values.shape[-1]), dtype=query.dtype, device=CUDA)


@contextmanager
def fake_cuda(monkeypatch):
    """Provide a `FakeCuda` device inside this context."""
    mode = FakeCuda()
    mode.install(monkeypatch)
    with mode.fake, mode:
        rng._constants(CUDA)  # copied once per process, before any round
        yield mode
    monkeypatch.undo()
    for cached in (rng._constants, import_module("draftproof.rules.token")._trial_addresses):
        cached.cache_clear()


def to_fake_cuda(module):
    """Replace a module's weights and buffers by fake GPU tensors."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(_fake(weight), requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = _fake(buffer)
    return module


def _fake(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
