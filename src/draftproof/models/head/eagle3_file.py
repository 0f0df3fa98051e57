"""Read a published EAGLE-3 head, of any of the formats in use, into an `Eagle3` network.

    speculators   `speculators_model_type: eagle3`, the layer's sizes in `transformer_layer_config`
    SpecForge     a flat Llama configuration, `architectures: [LlamaForCausalLMEagle3]`, options in `eagle_config`
    AngelSlim     the same with `Eagle3LlamaForCausalLM`; `tie_word_embeddings` may be set although an `lm_head` is there
    original      the same with tensors `midlayer.*` in place of `layers.0.*`

They differ in the numbering of the target's layers; see `taps_of`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.checkpoint import CONFIG, Checkpoint, load_exactly
from draftproof.models.head.eagle3 import Eagle3, Eagle3Shape
from draftproof.models.head.layer import LayerShape
from draftproof.models.head.rotary import Rotary

LAYER_CONFIGS: Final[dict[str, type[PreTrainedConfig]]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Kinds of layers that published heads are made of. transformers' classes fill in what a config.json leaves out."""

TAPS: Final = "eagle_aux_hidden_state_layer_ids"

RENAMED: Final = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Older names of tensors, by prefix."""

LEFT_OUT: Final = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""Tensors that some files hold and drafting does not use: copies of the target's, and the inverse of `d2t`."""


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """A head as read from its folder; None stands for the target's own.

    ids          the target's token of each entry of the draft vocabulary; None: all tokens
    embeddings   input embeddings
    output_rows  output layer over the draft vocabulary
    """

    network: Eagle3
    ids: Int[Tensor, " R"] | None
    embeddings: Float[Tensor, "V H"] | None
    output_rows: Float[Tensor, "R H"] | None


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of an EAGLE-3 head."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = any("eagle3" in str(name).lower() for name in config.get("architectures") or ())
    return named or "draft_vocab_size" in config


def load(checkpoint: Checkpoint, target_layers: int, taps: tuple[int, ...] | None = None) -> Eagle3Head:
    """Read a head for a target of this many layers. `taps` replaces the layers that the configuration names."""
    config = checkpoint.config
    _refuse_other_kinds(checkpoint)
    layer_config = _layer_config(checkpoint)
    taps = taps_of(config, target_layers) if taps is None else taps
    _check_taps(checkpoint, taps, target_layers)
    tensors = _tensors(checkpoint)
    ids, embeddings, output_rows = _vocabulary(checkpoint, tensors, layer_config)
    rotary = _rotary(checkpoint, layer_config)
    network = Eagle3(_shape(checkpoint, layer_config, tensors, taps), rotary)
    load_exactly(network, tensors, checkpoint.folder)
    return Eagle3Head(network.eval().requires_grad_(False), ids, embeddings, output_rows)


def taps_of(config: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose states a head reads: k stands for the state after layer k, as everywhere here.

    A list at the top level, as speculators writes it, means the same. One in `eagle_config`, as SpecForge writes it, is
    read by SGLang as "after layer k + 1". vLLM once read it as k, and lists for it begin with 2 as its default does
    (sgl-project/sglang#25454). No list stands for vLLM's default.
    """
    if config.get(TAPS):
        return tuple(config[TAPS])
    listed = (config.get("eagle_config") or {}).get(TAPS)
    if listed:
        return tuple(k if listed[0] == 2 else k + 1 for k in listed)
    return 2, target_layers // 2, target_layers - 3


def check_target(head: Eagle3Head, model: PreTrainedModel, source: str) -> None:
    """Refuse a target whose sizes are not those of the target that the head was trained on."""
    shape, width, tokens = head.network.shape, decoder_config(model).hidden_size, head_size(model)
    own_table, own_rows = head.embeddings is not None, head.output_rows is not None
    # (applies, what the head says, its number, the target's)
    compared = [
        (True, "tensor 'fc.weight' reads states of width", shape.target_hidden, width),
        (not own_table, "without an 'embed_tokens.weight' it needs embeddings of width", shape.layer.hidden, width),
        (not own_rows, "without an 'lm_head.weight' it needs output rows of width", shape.layer.hidden, width),
    ]
    if head.embeddings is not None:
        known = len(head.embeddings)
        compared.append((known < tokens, "tokens in tensor 'embed_tokens.weight':", known, tokens))
    if head.output_rows is not None and head.ids is None:
        compared.append((True, "tokens in tensor 'lm_head.weight':", len(head.output_rows), tokens))
    if head.ids is not None:
        last = int(head.ids.max())
        compared.append((last >= tokens or int(head.ids.min()) < 0, "last token in tensor 'd2t':", last, tokens))
    for applies, what, expected, found in compared:
        if applies and expected != found:
            raise ValueError(
                f"{source} is a head for another target: {what} {expected}, and the target has {found}. Use the target "
                "it was trained for, or a head for this one"
            )


def _refuse_other_kinds(checkpoint: Checkpoint) -> None:
    if "mask_hidden" in checkpoint.names:
        raise ValueError(
            f"{checkpoint.folder} holds tensor 'mask_hidden', so it is a P-EAGLE head, which is not supported: "
            "take an EAGLE-3 head for the same target"
        )
    if not is_eagle3(checkpoint.config):
        kind = checkpoint.config.get("speculators_model_type") or checkpoint.config.get("architectures")
        raise ValueError(
            f"{checkpoint.folder / CONFIG} is not that of an EAGLE-3 head but of {kind!r}: expected "
            "speculators_model_type 'eagle3', or an architecture such as 'LlamaForCausalLMEagle3'"
        )


def _layer_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of the head's layers, with transformers' defaults for what it leaves out."""
    source, config = checkpoint.folder / CONFIG, checkpoint.config
    flat = "speculators_model_type" not in config
    values = config if flat else config.get("transformer_layer_config")
    if not isinstance(values, dict):
        raise ValueError(f"{source} lacks transformer_layer_config, the sizes of the head's layer: get the file again")
    # A flat model_type is often the target's; the readers of these formats go by `architectures`, always a Llama layer.
    kind = "llama" if flat else values.get("model_type", "qwen3")
    values = {name: value for name, value in values.items() if name != "model_type"}
    if kind not in LAYER_CONFIGS:
        raise ValueError(f"{source}: layers of model_type {kind!r} are not known; known are {', '.join(LAYER_CONFIGS)}")
    try:
        made = LAYER_CONFIGS[kind](**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{source} does not describe a {kind} layer: {error}") from error
    if "sliding_attention" in (getattr(made, "layer_types", None) or ()):
        raise ValueError(f"{source}: layers with sliding attention are not supported in an EAGLE-3 head")
    return made


def _rotary(checkpoint: Checkpoint, layer_config: PreTrainedConfig) -> Rotary:
    try:
        return Rotary(layer_config)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{checkpoint.folder / CONFIG}: rope_parameters cannot be used: {error}") from error


def _check_taps(checkpoint: Checkpoint, taps: tuple[Any, ...], target_layers: int) -> None:
    where = f"{checkpoint.folder / CONFIG} reads the target's states after layers {taps}"
    if not all(isinstance(tap, int) and 1 <= tap <= target_layers for tap in taps):
        raise ValueError(f"{where}; this target has layers 1 to {target_layers}: it is a head for another target")
    if target_layers in taps:
        raise ValueError(
            f"{where}, the last one's before the final norm, and here states after the last layer are normed: "
            f"use a head that reads layers below {target_layers}"
        )


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read the tensors that drafting uses, under the names of today."""
    used = [name for name in checkpoint.names if name not in LEFT_OUT and not name.endswith("rotary_emb.inv_freq")]
    tensors = {}
    for name, tensor in checkpoint.read(used).items():
        old = next((prefix for prefix in RENAMED if name.startswith(prefix)), "")
        tensors[RENAMED.get(old, "") + name.removeprefix(old)] = tensor
    if "d2t" in tensors and "t2d" in checkpoint.names:
        _check_maps(checkpoint, tensors["d2t"], checkpoint.read(["t2d"])["t2d"])
    return tensors


def _check_maps(checkpoint: Checkpoint, d2t: Tensor, t2d: Tensor) -> None:
    """Refuse a file whose two maps between the vocabularies disagree: one of them is damaged."""
    ids = (torch.arange(len(d2t)) + d2t).sort().values
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise ValueError(
            f"{checkpoint.folder}: tensors 'd2t' and 't2d' name different tokens ({len(d2t)} and {int(t2d.sum())}): "
            "the file is damaged, get it again"
        )


def _vocabulary(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], layer_config: PreTrainedConfig
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Take ids, embeddings and output rows out of the tensors."""
    d2t, table, rows = (tensors.pop(name, None) for name in ("d2t", "embed_tokens.weight", "lm_head.weight"))
    hidden = layer_config.hidden_size
    size = checkpoint.config.get("draft_vocab_size") or layer_config.vocab_size
    for name, tensor, shape in (
        ("d2t", d2t, [size]),
        ("lm_head.weight", rows, [size, hidden]),
        ("embed_tokens.weight", table, [None if table is None else len(table), hidden]),
    ):
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{checkpoint.folder}: tensor {name!r} has shape {list(tensor.shape)}, and its {CONFIG} asks for "
                f"{shape}: config and weights do not belong together"
            )
    if d2t is None and size != layer_config.vocab_size:
        raise ValueError(
            f"{checkpoint.folder} lacks tensor 'd2t' of shape [{size}]: without it nobody knows which of the "
            f"{layer_config.vocab_size} tokens the {size} of the draft vocabulary are"
        )
    if d2t is not None and rows is None:
        raise ValueError(f"{checkpoint.folder} lacks tensor 'lm_head.weight' of shape [{size}, {hidden}]: get it again")
    return (None if d2t is None else torch.arange(size) + d2t.long()), table, rows


def _shape(
    checkpoint: Checkpoint, layer_config: PreTrainedConfig, tensors: Mapping[str, Tensor], taps: tuple[int, ...]
) -> Eagle3Shape:
    config = checkpoint.config
    options = {**(config.get("eagle_config") or {}), **config}

    def flag(name: str) -> bool:
        value = options.get(name, False)
        if value not in (True, False, None):
            raise ValueError(f"{checkpoint.folder / CONFIG}: {name} must be true or false; got {value!r}")
        return bool(value)

    layer = LayerShape.of(layer_config)
    if "speculators_model_type" not in config:
        layer = replace(layer, qk_norm="layers.0.self_attn.q_norm.weight" in tensors)
    each, together = flag("fc_norm"), flag("norm_before_fc")
    if each and together:
        raise ValueError(f"{checkpoint.folder / CONFIG} sets both fc_norm and norm_before_fc: at most one can be")
    return Eagle3Shape(
        layer=layer,
        layers=layer_config.num_hidden_layers,
        taps=taps,
        target_hidden=_target_hidden(checkpoint, layer_config, tensors, len(taps)),
        tap_norm="each" if each else "together" if together else "none",
        norm_before_residual=flag("norm_before_residual"),
        norm_output=flag("norm_output"),
    )


def _target_hidden(
    checkpoint: Checkpoint, layer_config: PreTrainedConfig, tensors: Mapping[str, Tensor], taps: int
) -> int:
    """Return the width of the target's states: the named one, or else what `fc.weight` was made for."""
    named = checkpoint.config.get("target_hidden_size")
    if named is not None or "fc.weight" not in tensors:
        return int(named or layer_config.hidden_size)
    width = tensors["fc.weight"].shape[-1]
    if width % taps:
        raise ValueError(
            f"{checkpoint.folder}: tensor 'fc.weight' reads {width} numbers, which are no {taps} states of the target: "
            f"{TAPS} in {CONFIG} names another number of layers than it was trained on"
        )
    return int(width // taps)
