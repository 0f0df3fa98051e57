"""Read a published EAGLE-3 head, of any of the formats in use, into an `Eagle3` network.

    speculators   `speculators_model_type: eagle3`, the layer's sizes in `transformer_layer_config`
    SpecForge     a flat Llama configuration, `architectures: [LlamaForCausalLMEagle3]`, options in `eagle_config`
    AngelSlim     the same with `Eagle3LlamaForCausalLM`; `tie_word_embeddings` may be set despite an `lm_head`
    original      the same with tensors `midlayer.*` in place of `layers.0.*`

They differ in the numbering of the target's layers; see `taps_of`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from draftproof.models.compatibility import decoder_config
from draftproof.models.head.checkpoint import CONFIG, Checkpoint, architectures, load_exactly
from draftproof.models.head.eagle3 import Eagle3, Eagle3Shape
from draftproof.models.head.layer import LayerShape, read_layer_config
from draftproof.models.head.rotary import Rotary
from draftproof.models.head.vocabulary import PublishedVocabulary, check_equal, check_vocabulary, take_vocabulary

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
    """A head as read from its folder."""

    network: Eagle3
    vocabulary: PublishedVocabulary


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of an EAGLE-3 head."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = any("eagle3" in name.lower() for name in architectures(config))
    return named or ("draft_vocab_size" in config and "dflash_config" not in config)


def load(checkpoint: Checkpoint, target_layers: int, taps: tuple[int, ...] | None = None) -> Eagle3Head:
    """Read a head for a target of this many layers. `taps` replaces the layers that the configuration names."""
    config = checkpoint.config
    _refuse_other_kinds(checkpoint)
    layer_config = _layer_config(checkpoint)
    taps = taps_of(config, target_layers) if taps is None else taps
    _check_taps(checkpoint, taps, target_layers)
    tensors = _tensors(checkpoint)
    vocabulary = take_vocabulary(checkpoint, tensors, layer_config)
    rotary = Rotary.of(layer_config, checkpoint.folder / CONFIG)
    network = Eagle3(_shape(checkpoint, layer_config, tensors, taps), rotary)
    load_exactly(network, tensors, checkpoint.folder, partial(_name_in_file, checkpoint))
    return Eagle3Head(network.eval().requires_grad_(False), vocabulary)


def taps_of(config: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose states a head reads: k stands for the state after layer k, as everywhere here.

    A list at the top level, as speculators writes it, means the same. One in `eagle_config`, as SpecForge writes it, is
    read by SGLang as "after layer k + 1". vLLM once read it as k, and lists for it begin with 2 as its default does
    (sgl-project/sglang#25454). No list stands for vLLM's default.
    """
    listed, inner = config.get(TAPS), _inner(config).get(TAPS)
    for value in (listed, inner):
        if value and not (isinstance(value, list) and all(type(k) is int for k in value)):
            raise ValueError(f"{CONFIG}: {TAPS} must be a list of layers' numbers; got {value!r}")
    if listed:
        return tuple(listed)
    if inner:
        return tuple(k if inner[0] == 2 else k + 1 for k in inner)
    return 2, target_layers // 2, target_layers - 3


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options in `eagle_config`, if there are any."""
    inner = config.get("eagle_config")
    return inner if isinstance(inner, dict) else {}


def check_target(head: Eagle3Head, model: PreTrainedModel, source: str) -> None:
    """Refuse a target whose sizes are not those of the target that the head was trained on."""
    shape = head.network.shape
    width = decoder_config(model).hidden_size
    check_equal("tensor 'fc.weight' reads states of width", shape.target_hidden, width, source)
    check_vocabulary(head.vocabulary, shape.layer.hidden, model, source)


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
    config, source = checkpoint.config, checkpoint.folder / CONFIG
    if "speculators_model_type" in config:
        made = read_layer_config(config.get("transformer_layer_config"), source)
    else:
        # Its model_type is often the target's; the readers of these formats go by `architectures`: a Llama layer.
        made = read_layer_config(config | {"model_type": "llama"}, source)
    if "sliding_attention" in (getattr(made, "layer_types", None) or ()):
        raise ValueError(f"{source}: layers with sliding attention are not supported in an EAGLE-3 head")
    return made


def _check_taps(checkpoint: Checkpoint, taps: tuple[int, ...], target_layers: int) -> None:
    where = f"{checkpoint.folder / CONFIG} reads the target's states after layers {taps}"
    if not all(1 <= tap <= target_layers for tap in taps):
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
        new = RENAMED.get(old, "") + name.removeprefix(old)
        if new in tensors:
            raise ValueError(
                f"{checkpoint.folder} holds tensor {new!r} twice, under that name and an older one: get it again"
            )
        tensors[new] = tensor
    return tensors


def _name_in_file(checkpoint: Checkpoint, name: str) -> str:
    """Return the name that a tensor has in the checkpoint, or would have: an older one where it uses those."""
    for old, new in RENAMED.items():
        if name.startswith(new) and any(each.startswith(old) for each in checkpoint.names):
            return old + name.removeprefix(new)
    return name


def _shape(
    checkpoint: Checkpoint, layer_config: PreTrainedConfig, tensors: Mapping[str, Tensor], taps: tuple[int, ...]
) -> Eagle3Shape:
    config = checkpoint.config
    options = {**_inner(config), **config}

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
    named, fc = checkpoint.config.get("target_hidden_size"), tensors.get("fc.weight")
    if named is not None and not (type(named) is int and named >= 1):
        raise ValueError(f"{checkpoint.folder / CONFIG}: target_hidden_size must be a whole number ≥ 1; got {named!r}")
    if named is not None or fc is None or fc.ndim != 2:
        return int(named or layer_config.hidden_size)
    width = fc.shape[1]
    if width % taps:
        raise ValueError(
            f"{checkpoint.folder}: tensor 'fc.weight' reads {width} numbers, which are no {taps} states of the target: "
            f"{TAPS} in {CONFIG} names another number of layers than it was trained on"
        )
    return int(width // taps)
