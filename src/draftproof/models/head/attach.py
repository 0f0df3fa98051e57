"""Attach a head to its target: the target's embeddings before the head, and its output rows after it."""

import copy
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.distribution import DraftVocab
from draftproof.models.compatibility import head_size
from draftproof.models.cpu_linear import bfloat16_packable, pack, pack_bfloat16, packable
from draftproof.models.fingerprint import PerModel, fingerprint, weights_version
from draftproof.models.head import file as headfile
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.taps import embeddings, output_rows

ON_CPU: Final = 12288
"""Tokens in the draft vocabulary on a CPU, where a step is bound by reading its weights. More tokens would raise
acceptance a little and cost more time than they save (docs/decisions.md)."""

SHIPPED: Final = Path(__file__).parents[2] / "heads" / "smollm2-135m"
"""The folder of the head that the package ships for the bundled model."""

_FITTED: PerModel["FittedHead"] = PerModel()
"""The last head attached to each target that is alive: reading one and laying out its weights takes 70 ms."""


def attach(head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, size: int | None = None) -> FittedHead:
    """Attach a copy of a head to a target; see `FittedHead.on`."""
    device = torch.device(model.device)
    size = size or (ON_CPU if device.type == "cpu" else len(ids))
    ids = ids[:size].to(device=device, dtype=torch.long)
    head = copy.deepcopy(head).to(device=device, dtype=torch.float32).eval().requires_grad_(False)
    rows = nn.Sequential(_linear(output_rows(model, ids).to(device=device, dtype=torch.float32)))
    for part in (head, rows):
        if bfloat16_packable(part):
            pack_bfloat16(part)
        elif packable(part):
            pack(part)
    return FittedHead(head, embeddings(model), rows, DraftVocab.of(ids, head_size(model)))


def fitted(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load the head in this folder and attach it to its target; refuse any other target.

    It is read once for each target, and again if the files or the target have changed.
    """
    key = (str(folder), headfile.file_stamps(folder), fingerprint(model), weights_version(model))
    return _FITTED.get(model, "head", key, lambda: _fit(folder, model))


def _fit(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    head, meta = headfile.load(folder)
    headfile.check_target(meta, model)
    return FittedHead.on(head, torch.tensor(meta.ids), model)


def shipped_fits(model: PreTrainedModel) -> bool:
    """Return whether the package ships a head that was trained on this model."""
    try:
        headfile.check_target(headfile.load_metadata(SHIPPED), model)
    except ValueError:
        return False
    return True


def _linear(weight: Float[Tensor, "R H"]) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return layer
