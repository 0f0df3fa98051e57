"""A second body for a model: modules and configuration copied, weights shared, so that the user's stays untouched."""

import copy

from torch import nn
from transformers import PreTrainedModel

from draftproof.core.types import InexactError
from draftproof.models.attention import NAME, register
from draftproof.models.compatibility import decoder_config


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """A structural copy that shares every parameter and buffer; what is changed on it does not reach the original.

    transformers leaves hooks and switches on the modules that it runs (hidden states, attention kernels, rotary
    frequencies); here they land on the copy. A model should be on its device before it is copied.
    """
    shared = [*model.parameters(), *model.buffers()]
    twin: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    return twin


def attentive(model: PreTrainedModel) -> PreTrainedModel:
    """A shadow whose attention takes our masks, by our own kernel where the model looks its kernel up by name."""
    twin = shadow(model)
    wanted = decoder_config(twin)._attn_implementation
    if wanted == "eager" or (wanted == "sdpa" and not twin._supports_attention_backend):
        return twin
    if not twin._supports_attention_backend:
        raise InexactError(
            f"{type(model).__name__} runs {wanted!r}, which takes no mask of ours: load it with "
            'attn_implementation="sdpa" or "eager"'
        )
    register()
    twin.set_attn_implementation(NAME)
    return twin


def shortened(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A structural copy with only the first `count` decoder layers, then the model's own norm and head."""
    twin = shadow(model)
    config = decoder_config(twin)
    total = config.num_hidden_layers
    if not 1 <= count < total:
        raise ValueError(f"first_layers({count}): {type(model).__name__} has {total} layers, so take 1 to {total - 1}")
    parent, name = _stack(twin, total)
    setattr(parent, name, getattr(parent, name)[:count])
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    return twin


def _stack(twin: PreTrainedModel, total: int) -> tuple[nn.Module, str]:
    """Where the decoder layers hang: the only list of that many modules under the base model."""
    found = [
        (parent, name)
        for parent in twin.base_model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(found) != 1:
        raise ValueError(
            f"first_layers needs one stack of {total} decoder layers, and {type(twin).__name__} has {len(found)} lists "
            "of that many modules: pass a smaller model as the drafter instead"
        )
    return found[0]
