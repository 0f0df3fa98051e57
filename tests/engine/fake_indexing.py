"""Indexing for tensors of a fake device (fake_cuda.py), built from operators that need no driver.

Indexing that would synchronise is refused: by masks, and by lists or CPU tensors.
"""

import torch


def get_item(tensor, at):
    """Return `tensor[at]`."""
    view, tensors = _view(tensor, at)
    if not any(index is not None for index in tensors):
        return view
    _refuse_masks(tensor, tensors)
    return torch.ops.aten.index(view, tensors)


def set_item(tensor, at, new):
    """Assign `tensor[at] = new`."""
    view, tensors = _view(tensor, at)
    new = new if isinstance(new, torch.Tensor) else torch.full((), new, dtype=tensor.dtype, device=tensor.device)
    if any(index is not None for index in tensors):
        _refuse_masks(tensor, tensors)
        torch.ops.aten.index_put_(view, tensors, new)
    else:
        view.copy_(new)


def _refuse_masks(tensor, tensors):
    if any(index is not None and index.dtype == torch.bool for index in tensors):
        raise AssertionError(f"indexing by a mask synchronises: {tuple(tensor.shape)}")


def _view(tensor, at):
    """Apply slices, integers and None; return the view and the index tensors that are left, by dimension."""
    at = at if isinstance(at, tuple) else (at,)
    named = sum(part is not None and part is not Ellipsis for part in at)
    if Ellipsis not in [part for part in at if not isinstance(part, torch.Tensor)]:
        at = (*at, Ellipsis)
    view, tensors = tensor, []
    for part in at:
        d = len(tensors)
        if part is Ellipsis:
            tensors += [None] * (tensor.ndim - named)
        elif part is None:
            view = view.unsqueeze(d)
            tensors.append(None)
        elif isinstance(part, slice):
            view = torch.ops.aten.slice(view, d, part.start, part.stop, part.step or 1)
            tensors.append(None)
        elif isinstance(part, int):
            view = view.select(d, part)
        else:
            assert isinstance(part, torch.Tensor), f"indexing by values on the CPU synchronises: {part}"
            assert part.is_cuda, f"indexing by values on the CPU synchronises: {part}"
            tensors.append(part)
    return view, tensors
