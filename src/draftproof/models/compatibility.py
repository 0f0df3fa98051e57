"""Decide whether a transformers model can be served exactly, and read its sizes from its configuration.

`refuse_unsupported` checks what is known without a pass. What is not known from that (a family that the tests do not
cover, a quantised model, code from elsewhere) is run on a few tokens by probe.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from draftproof.core.device import is_cpu, runs_kernels
from draftproof.core.types import InexactError
from draftproof.models.interface import Model
from draftproof.models.transformers_types import PreTrainedConfig, PreTrainedModel

TESTED_FAMILIES = frozenset(
    [
        *("bloom", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama"),
        *("mistral", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "starcoder2"),
    ]
)
"""Model types that tests/models/test_hf.py compares with a plain forward; all others are probed."""

SHORTENABLE = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers of transformers that a slot cache can replace: one key and one value for each token."""

RECURRENT = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
"""Cache layers of transformers that hold recurrent states, which models/recurrent.py rolls back by replay."""

POSITIONS_BY_SLOT = {
    "gpt_neo": "its local layers cut their window by slot, the same for all rows",
    "mpt": "its ALiBi counts slots, which in a tree are not positions",
}
"""Families refused by name, with the reason: a probe of a few tokens, or in half precision, might accept them."""

SERVED_DEVICES = ("cpu", "cuda")
"""Device types that the tests cover. Others, such as "mps", lack operations or round differently, untested."""

OWN_PACKAGES = ("torch", "transformers", "draftproof")
"""Packages whose modules are known code; a model with a module from elsewhere (remote code, adapters) is probed."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_KERNEL_HEAD = 256
"""What our attention kernel serves on a GPU (kernels/attention.py)."""

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantised; float8 is."""


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Return whether some layers of the model keep recurrent states in transformers' cache."""
    return any(kind in RECURRENT for kind in _layer_kinds(decoder_config(model)))


def refuse_unsupported(model: PreTrainedModel, *, recurrent: bool = False) -> None:
    """Raise if the model cannot be served exactly, or only after a change to it.

    recurrent  the caller can roll back recurrent states
    """
    name = type(model).__name__
    family = model.config.model_type
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout changes the distribution: call model.eval() first")
    _refuse_placement(model)
    if family in POSITIONS_BY_SLOT:
        raise InexactError(f"{name} cannot be served in ragged batches and trees: {POSITIONS_BY_SLOT[family]}")
    served = (SHORTENABLE[0], *RECURRENT) if recurrent else SHORTENABLE
    for index, kind in enumerate(_layer_kinds(decoder_config(model))):
        if kind not in served:
            raise InexactError(
                f"{name} cannot roll back after a rejection: layer {index} keeps a {kind}, a state "
                "that cannot be shortened. Use a model with attention in every layer, or transformers' own generate"
            )
    if getattr(model, "_is_stateful", False) and not recurrent:
        raise InexactError(
            f"{name} cannot roll back after a rejection: transformers marks its state ({family}) as recurrent. "
            "Use a model with attention in every layer, or transformers' own generate"
        )


def packing_refusal(model: PreTrainedModel) -> str | None:
    """Return why the rows of a model cannot lie in a pool, and its passes are rectangular; None if they can.

    A pool needs an attention function that knows the rows of a pass; on a GPU it is a kernel of ours.
    """
    if not is_cpu(model.device):
        if not runs_kernels(model.device):
            return f"on {model.device.type} a pool needs Triton, which is not installed"
        if model.dtype not in KERNEL_DTYPES:
            return f"the attention kernel computes in float32, bfloat16 or float16, and the model is in {model.dtype}"
        if (size := _largest_head(decoder_config(model))) > LARGEST_KERNEL_HEAD:
            return f"the attention kernel serves heads of up to {LARGEST_KERNEL_HEAD} numbers, and the model has {size}"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} brings its own attention: it does not use transformers' attention interface"
    return None


def _largest_head(config: PreTrainedConfig) -> int:
    """Return the size of a query head, as far as the configuration tells; 0 if it does not."""
    sizes = [getattr(config, name, None) for name in ("head_dim", "global_head_dim", "qk_head_dim")]
    if sizes[0] is None and getattr(config, "num_attention_heads", None):
        sizes.append(config.hidden_size // config.num_attention_heads)
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _refuse_placement(model: PreTrainedModel) -> None:
    """Raise if the model is not as a whole on one CPU or CUDA device."""
    name = type(model).__name__
    placed = getattr(model, "hf_device_map", None) or {}
    mapped = sorted({_device_name(device) for device in placed.values()})
    if len(mapped) > 1:
        raise ValueError(
            f"{name} is spread over several devices (hf_device_map names {', '.join(mapped)}), and its cache must be "
            'on one: load the model on one device, with device_map={"": "cuda:0"}'
        )
    if any(_is_offloaded(module) for module in model.modules()):
        raise ValueError(
            f"{name} has weights that accelerate loads for each pass (hf_device_map={placed}): load it on one device "
            "without offloading, or load a smaller or quantised model"
        )
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"{name} has weights on {', '.join(devices)}: move it to one device with model.to()")
    for device in devices:
        check_device(torch.device(device), name)


def check_device(device: torch.device, what: str) -> None:
    """Raise if this kind of device is not one that the tests cover."""
    if device.type not in SERVED_DEVICES:
        raise ValueError(
            f"{what} is on {str(device)!r}, and models are served only on {' and '.join(SERVED_DEVICES)}, where the "
            'tests compare them with a plain forward: use model.to("cpu"), or load it with device="cpu"'
        )


def _device_name(device: object) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether a hook of accelerate loads the module's weights for each pass."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ())))


def has_foreign_code(model: PreTrainedModel) -> bool:
    """Return whether the model runs modules that neither transformers nor torch defines, such as remote code."""
    return any(type(module).__module__.partition(".")[0] not in OWN_PACKAGES for module in model.modules())


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether weights or activations are quantised, as far as the model or its modules show it."""
    settings = [getattr(config, "quantization_config", None) for config in (model.config, decoder_config(model))]
    flags = [getattr(model, name, None) for name in ("hf_quantizer", "is_loaded_in_8bit", "is_loaded_in_4bit")]
    return (
        any([*settings, *flags])
        or any(type(weight) is not nn.Parameter or weight.dtype not in PLAIN_DTYPES for weight in model.parameters())
        or any(_is_unusual_linear(module) for module in model.modules())
    )


def _is_unusual_linear(module: nn.Module) -> bool:
    """Return whether this is a linear layer of a class that may compute more than a matrix product.

    Quantisation libraries subclass or replace `nn.Linear`; transformers' own are in `transformers.integrations`.
    """
    if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return False
    usual = type(module) is nn.Linear or type(module).__module__.startswith(("transformers.models.", "draftproof."))
    return not usual


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, also of a model that has other parts."""
    return model.config.get_text_config(decoder=True)


def head_size(model: PreTrainedModel) -> int:
    """Return the number of logits per position, which may exceed the tokenizer's vocabulary."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    return int(decoder_config(model).vocab_size if size is None else size)


def cached_layers(config: PreTrainedConfig) -> int:
    """Count the layers with keys and values of their own; some models share them between layers."""
    return len(_layer_kinds(config))


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the classes of transformers' cache layers for a model, by name."""
    from transformers import DynamicCache

    return [type(layer).__name__ for layer in DynamicCache(config=config).layers]


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions the model can be served for; None if there is no limit.

    LongRoPE changes all its frequencies at its original length. A cache that is filled before and read after would mix
    both, and padding could cross that length early, so such a model is served up to there only.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
    known = [limit for limit in limits if limit is not None and limit > 0]
    return min(known) if known else None


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Return the attention window of each kind of layer in the model; None: full attention."""
    sizes = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # as transformers infers it
        kinds = [next((kind for kind in ("sliding_attention", "chunked_attention") if sizes[kind]), "full_attention")]
    return {kind: sizes[kind] for kind in dict.fromkeys(kinds)}


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of all layers, or of each kind of layer where kinds differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))


def same_vocabulary(target: Model, drafter: Model, tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Tell whether the drafter's ids mean the target's tokens. Different padding is fine.

    Without both tokenizers, models of about the same size are taken to have the same; others are refused.
    """
    if draft_tokenizer is None or tokenizer is None:
        near = abs(target.vocab_size - drafter.vocab_size) <= 1024  # padded to another multiple
        if not near:
            raise InexactError(
                f"the drafter scores {drafter.vocab_size} tokens and the target {target.vocab_size}: their "
                "vocabularies differ, and cannot be matched without both tokenizers. Pass tokenizer= and "
                "draft_tokenizer=, or use a drafter of the same family"
            )
        return True
    for name, given in (("tokenizer", tokenizer), ("draft_tokenizer", draft_tokenizer)):
        if not hasattr(given, "get_vocab"):
            raise ValueError(
                f"{name} is a {type(given).__name__} without get_vocab(), so that the two vocabularies cannot be "
                "compared: pass a tokenizer of transformers"
            )
    one, other = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    shared = sum(one.get(token) == i for token, i in other.items())
    differs = any(one.get(token, i) != i for token, i in other.items())
    return not differs and shared >= 0.9 * min(len(one), len(other))
