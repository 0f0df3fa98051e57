"""Attach a head to its target: the target's embeddings before the head, and its output rows after it."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.core.device import runs_kernels
from draftproof.core.distribution import DraftVocab
from draftproof.models.compatibility import head_size
from draftproof.models.compiled_pass import compile_linears, compiled_refusal, fits_compiled_int8
from draftproof.models.cpu_linear import bfloat16_packable, pack, pack_bfloat16, packable
from draftproof.models.fingerprint import PerModel, fingerprint, weights_version
from draftproof.models.head import file as headfile
from draftproof.models.head.network import FittedHead, Head, HeadNetwork, linear_on
from draftproof.models.head.taps import embeddings, output_rows
from draftproof.models.heap import trim_heap
from draftproof.models.int4_linear import pack_int4, runs_int4
from draftproof.models.int8_linear import pack_int8
from draftproof.models.transformers_types import PreTrainedModel

ON_CPU: Final = 12288
"""Tokens in the draft vocabulary on a CPU, where a step is bound by reading its weights. More tokens would raise
acceptance a little and cost more time than they save (docs/decisions.md)."""

SHIPPED: Final = Path(__file__).parents[2] / "heads" / "smollm2-135m"
"""The folder of the head that the package ships for the bundled model."""

Net = TypeVar("Net", bound=nn.Module)
F = TypeVar("F")

_FITTED: PerModel[Any] = PerModel()
"""The last head attached to each target that is alive: reading one and laying out its weights takes 70 ms."""


def attach(head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, size: int | None = None) -> FittedHead:
    """Attach a copy of a head to a target; see `FittedHead.on`."""
    return _attach(copy.deepcopy(head), ids, model, size)


def _attach(head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, size: int | None = None) -> FittedHead:
    """Attach a head to a target; it must not be used again."""
    size = size or (ON_CPU if model.device.type == "cpu" else len(ids))
    return assemble(head, embeddings(model), output_rows(model, ids[:size]), ids[:size], model)


def assemble(
    network: Net,
    table: Float[Tensor, "V H"],
    output: Float[Tensor, "R H"],
    ids: Int[Tensor, " R"],
    model: PreTrainedModel,
) -> FittedHead:
    network, rows, vocab = laid_out(network, output, ids, model)
    assert isinstance(network, HeadNetwork)
    return FittedHead(network, table, rows, vocab, dtype_on(model))


def dtype_on(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that a target's head computes in.

    A step is bound by reading its weights: on a GPU bfloat16 halves its time, and published heads are made for it. Not
    float16, in which states of a target's first tokens may overflow.
    """
    half = torch.device(model.device).type != "cpu" and model.dtype == torch.bfloat16
    return torch.bfloat16 if half else torch.float32


def laid_out(
    network: Net, output: Float[Tensor, "R H"], ids: Int[Tensor, " R"], model: PreTrainedModel
) -> tuple[Net, nn.Module, DraftVocab]:
    """Move network and output rows to the target's device, in the dtype of `dtype_on`, and lay them out for a CPU."""
    device, dtype = torch.device(model.device), dtype_on(model)
    network = network.to(device).eval().requires_grad_(False)
    for weight in network.parameters():  # not buffers: angles of positions need all their bits
        weight.data = weight.data.to(dtype)
    rows = nn.Sequential(linear_on(output.to(device=device, dtype=dtype).contiguous()).requires_grad_(False))
    if runs_kernels(device):
        from draftproof.models.fused import fuse_gates  # imports transformers, which a CPU's drafts do without

        fuse_gates(network)
    for part in (network, rows):
        if runs_int4(model) and _quantise(part):
            compile_linears(part)
            continue  # a drafter for a fast target must be fast; what it loses in precision is a few accepted tokens
        if bfloat16_packable(part) and not _has_bias(part):
            pack_bfloat16(part)
        elif packable(part):
            pack(part)
    return network, rows, DraftVocab.of(ids.to(device=device, dtype=torch.long), head_size(model))


def _quantise(part: nn.Module) -> bool:
    """Quantise network or output rows, in place, if their shapes fit; return whether they do.

    Where a head is compiled, its layer has eight bits: four would cost 3 % of the accepted tokens, and time only for
    the output rows, which have most of the weights.
    """
    if isinstance(part, Head) and compiled_refusal() is None and fits_compiled_int8(part):
        pack_int8(part)
        return True
    return pack_int4(part)


def _has_bias(network: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) and module.bias is not None for module in network.modules())


def fitted(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load the head in this folder and attach it to its target; warn of other weights, refuse other sizes.

    It is read once for each target, and again if the files or the target have changed.
    """
    return attached_once(folder, headfile.file_stamps(folder), model, lambda: _fit(folder, model))


def attached_once(folder: str | Path, stamps: Any, model: PreTrainedModel, make: Callable[[], F]) -> F:
    key = (str(folder), stamps, fingerprint(model), weights_version(model))
    found: F = _FITTED.get(model, "head", key, make)
    return found


def _fit(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    head, meta = headfile.load(folder)
    headfile.check_sizes(meta, model)
    other = headfile.other_weights(meta, model)
    if other is not None:  # a fine-tuned target, or one with an adapter
        warnings.warn(f"{other}: texts stay exact, but fewer drafts may be accepted", stacklevel=2)
    fitted = _attach(head, torch.tensor(meta.ids), model)
    trim_heap()
    return fitted


def shipped_fits(model: PreTrainedModel) -> bool:
    """Return whether the package ships a head that was trained on this model."""
    try:
        headfile.check_target(headfile.load_metadata(SHIPPED), model)
    except ValueError:
        return False
    return True
