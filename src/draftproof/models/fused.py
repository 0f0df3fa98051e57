"""Run the layers of Llama-shaped models with few calls: merged products, and one call for each small step.

The layers of our own structural copy are changed, never those of the model passed in. A module is replaced because it
has the parts and computes what its replacement computes (fused_modules.py, fused_layer.py). Models that are built
differently keep their modules.

On a GPU the steps are Triton kernels (kernels/layer.py). On a CPU they are compiled loops (layer_steps.py), for models
in float32 whose linear layers are packed: those are joined, which costs no memory (cpu_linear.py).
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from draftproof.core.device import runs_kernels
from draftproof.models.cpu_linear import PackedLinear
from draftproof.models.fused_layer import fuse_sums
from draftproof.models.fused_modules import FusedAttention, FusedMLP, MergedLinear, share_storage
from draftproof.models.fused_norm import FusedNorm, serves
from draftproof.models.heap import trim_heap
from draftproof.models.rotary_table import RotaryTable
from draftproof.models.weight_sharing import decoder_stack

MERGED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that read the same input, and are one product."""


@dataclass(slots=True)
class Fusion:
    """What was replaced in a model: modules by kind, and bytes of weights that were copied to be merged.

    rotary  whether the angles of positions are looked up (rotary_table.py)
    """

    norms: int = 0
    attentions: int = 0
    gates: int = 0
    layers: int = 0
    rotary: bool = False
    bytes: int = 0


@torch.no_grad()
def fuse(model: PreTrainedModel, positions: int | None = None) -> Fusion:
    """Replace modules of a structural copy by fused ones, where they compute the same.

    positions  that the model has; None if there is no limit
    """
    made, stack = Fusion(), decoder_stack(model)
    if stack is None or not serves(model.device, model.dtype) or not _is_worthwhile(model):
        return made
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (norm := FusedNorm.of(child)) is not None:
                setattr(module, name, norm)
                made.norms += 1
    parent, name = stack
    for layer in getattr(parent, name):
        for part, child in list(layer.named_children()):
            if (gated := FusedMLP.of(child)) is not None:
                setattr(layer, part, gated)
                made.gates += 1
                made.bytes += _copied(gated.joined, child)
            elif (attention := FusedAttention.of(child)) is not None:
                setattr(layer, part, attention)
                made.attentions += 1
                made.bytes += _copied(attention.joined, child)
        trim_heap()  # joining packed layers frees their parts, and the next ones do not fit into the gaps
    made.layers = fuse_sums(list(getattr(parent, name)), getattr(parent, "norm", None))
    made.rotary = made.attentions > 0 and _look_up_angles(parent, positions, model)
    return made


def _look_up_angles(parent: nn.Module, positions: int | None, model: PreTrainedModel) -> bool:
    """Replace the rotary embedding of a stack of layers by a table, on a GPU; on a CPU its calls cost little."""
    embedding = getattr(parent, "rotary_emb", None)
    if not isinstance(embedding, nn.Module) or not runs_kernels(model.device):
        return False
    like = torch.empty((1, 1, 1), dtype=model.dtype, device=model.device)
    table = RotaryTable.of(embedding, positions, like)
    if table is not None:
        parent.rotary_emb = table
    return table is not None


@torch.no_grad()
def fuse_gates(network: nn.Module) -> int:
    """Replace the gated MLPs of a network of ours by fused ones, which have the only copy of their weights."""
    made = 0
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if (gated := FusedMLP.of(child)) is not None:
                setattr(parent, name, gated)
                made += 1
    return made


def _is_worthwhile(model: PreTrainedModel) -> bool:
    """Return whether a model runs kernels or has packed layers: around unpacked products little would be saved."""
    return runs_kernels(model.device) or any(type(module) is PackedLinear for module in model.modules())


def _copied(joined: nn.Module, module: nn.Module) -> int:
    """Return the bytes that merging a module's weights has added."""
    merged = joined.weight if isinstance(joined, MergedLinear) else None
    if merged is None or any(share_storage(merged, weight) for weight in module.parameters()):
        return 0
    return merged.nbytes


@torch.no_grad()
def lay_side_by_side(model: nn.Module) -> None:
    """Move weights that will be merged into one buffer each, so that merging copies nothing.

    For models that we loaded ourselves: the parameters keep their values and become slices, which tools that look at
    storages (`save_pretrained`) may refuse.
    """
    for module in model.modules():
        for names in MERGED:
            parts = [part for name in names if type(part := getattr(module, name, None)) is nn.Linear]
            if len(parts) == len(names):
                weights = [part.weight for part in parts]
                sizes = [len(weight) for weight in weights]
                for weight, place in zip(weights, torch.cat([w.detach() for w in weights]).split(sizes), strict=True):
                    weight.data = place
