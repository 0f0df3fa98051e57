"""Copy a transformers model without its weights: modules and configuration are copied, tensors are shared.

The user's model stays unaltered, and the copy costs no memory.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftproof.core.types import InexactError
from draftproof.models.attention import ATTENTION_NAME, register
from draftproof.models.compatibility import decoder_config


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configuration; parameters and buffers are shared with the original.

    transformers leaves hooks and flags on the modules that it runs (hidden states, attention kernels, rotary
    frequencies); they land on the copy. Move a model to its device before copying it. A quantised model must have run
    once (`run_once`).
    """
    shared = [*model.parameters(), *model.buffers(), *_attribute_tensors(model)]
    copied: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    return copied


@torch.no_grad()
def run_once(model: PreTrainedModel) -> None:
    """Run a quantised model on one token, as its user's first pass would.

    Layers of bitsandbytes move state from the weight into the module in their first pass. The copy shares the weight:
    if it ran first, the state would be gone for the original, which would then compute nonsense.
    """
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    inputs = {"decoder_input_ids": token} if model.config.is_encoder_decoder else {}
    model(input_ids=token, use_cache=False, **inputs)


def _attribute_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are neither parameters nor buffers: attributes, or those of objects that hold quantised state.

    For a quantised model they are most of its weights.
    """
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                yield value
            elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | PreTrainedConfig):
                yield from (each for each in vars(value).values() if isinstance(each, Tensor))


def copy_for_slot_cache(model: PreTrainedModel, *, packed: bool = False) -> PreTrainedModel:
    """Copy a model so that its attention accepts our masks, or runs packed.

    It runs `folded_attention` if the model looks its attention up by name, else its own `eager` or `sdpa`.
    """
    copied = structural_copy(model)
    implementation = decoder_config(copied)._attn_implementation
    own = implementation == "eager" or (implementation == "sdpa" and not copied._supports_attention_backend)
    if own and not packed:
        return copied
    if not copied._supports_attention_backend:
        raise InexactError(
            f"{type(model).__name__} runs {implementation!r}, which does not accept our masks: load it with "
            'attn_implementation="sdpa" or "eager"'
        )
    register()
    copied.set_attn_implementation(ATTENTION_NAME)
    return copied


def copy_first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Copy a model with only its first `count` decoder layers, followed by its norm and output layer."""
    copied = structural_copy(model)
    config = decoder_config(copied)
    total = config.num_hidden_layers
    if not 1 <= count < total:
        raise ValueError(f"first_layers({count}): {type(model).__name__} has {total} layers, so take 1 to {total - 1}")
    stack = decoder_stack(copied)
    if stack is None:
        raise ValueError(
            f"first_layers needs one stack of {total} decoder layers, and {type(model).__name__} has none or several "
            "lists of that many modules: pass a smaller model as the drafter instead"
        )
    parent, name = stack
    setattr(parent, name, getattr(parent, name)[:count])
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    return copied


def decoder_stack(model: PreTrainedModel) -> tuple[nn.Module, str] | None:
    """Find the list of decoder layers (its parent, its name): the only list of that many modules in the base model.

    None if there is no such list, or several.
    """
    total = decoder_config(model).num_hidden_layers
    found = [
        (parent, name)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    return found[0] if len(found) == 1 else None
