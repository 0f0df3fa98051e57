"""Read a published DFlash drafter into a `DFlash` network.

    original     a flat Qwen3 configuration, `architectures: [DFlashDraftModel]`, options in `dflash_config`
    speculators  `speculators_model_type: dflash`, the layers' sizes in `transformer_layer_config`

They differ in the numbering of the target's layers; see `taps_of`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel

from draftproof.models.compatibility import decoder_config
from draftproof.models.head.checkpoint import CONFIG, Checkpoint, architectures, load_exactly
from draftproof.models.head.dflash import DFlash, DFlashShape
from draftproof.models.head.layer import LayerShape, read_layer_config
from draftproof.models.head.rotary import Rotary
from draftproof.models.head.vocabulary import PublishedVocabulary, check_equal, check_vocabulary, take_vocabulary

LEFT_OUT: Final = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""Tensors that some files hold and drafting does not use: copies of the target's, and the inverse of `d2t`."""

OTHER_KINDS: Final = {"markov_head.": "DSpark", "candidate_selector.": "DFlash 2", "confidence_head.": "DSpark"}
"""Prefixes of tensors that only drafters of other kinds have."""


@dataclass(frozen=True, slots=True)
class DFlashDraft:
    """A drafter as read from its folder."""

    network: DFlash
    vocabulary: PublishedVocabulary


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of a DFlash drafter."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "dflash")
    return "dflash_config" in config or "DFlashDraftModel" in architectures(config)


def load(checkpoint: Checkpoint, target_layers: int, taps: tuple[int, ...] | None = None) -> DFlashDraft:
    """Read a drafter for a target of this many layers. `taps` replaces the layers that the configuration names."""
    _refuse_other_kinds(checkpoint)
    source, config = checkpoint.folder / CONFIG, checkpoint.config
    published = "speculators_model_type" in config
    values = config.get("transformer_layer_config") if published else config | {"model_type": "qwen3"}
    layer_config = read_layer_config(values, source)
    tensors = checkpoint.read(name for name in checkpoint.names if name not in LEFT_OUT)
    vocabulary = take_vocabulary(checkpoint, tensors, layer_config)
    taps = taps_of(checkpoint) if taps is None else taps
    _check_taps(checkpoint, taps, target_layers)
    fc = tensors.get("fc.weight")
    width = layer_config.hidden_size if fc is None or fc.ndim != 2 else fc.shape[1] // len(taps)
    network = DFlash(_shape(checkpoint, layer_config, taps, width), Rotary.of(layer_config, source))
    load_exactly(network, tensors, checkpoint.folder)
    return DFlashDraft(network.eval().requires_grad_(False), vocabulary)


def check_target(draft: DFlashDraft, model: PreTrainedModel, source: str) -> None:
    """Refuse a target whose sizes are not those of the target that the drafter was trained on."""
    shape, table = draft.network.shape, draft.vocabulary.embeddings
    check_equal(
        "tensor 'fc.weight' reads states of width", shape.target_hidden, decoder_config(model).hidden_size, source
    )
    check_vocabulary(draft.vocabulary, shape.layer.hidden, model, source)
    known = len(model.get_input_embeddings().weight if table is None else table)
    if not 0 <= shape.mask_token < known:
        raise ValueError(f"{source}: mask_token_id {shape.mask_token} has no embedding; there are {known} tokens")


def taps_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the target's layers whose states a drafter reads: k stands for the state after layer k.

    speculators writes the same numbers; `target_layer_ids` of the original format are one lower.
    """
    if "speculators_model_type" in checkpoint.config:
        listed, shift = checkpoint.config.get("aux_hidden_state_layer_ids"), 0
    else:
        listed, shift = _option(checkpoint, "target_layer_ids"), 1
    if not (isinstance(listed, list) and listed and all(type(layer) is int for layer in listed)):
        raise ValueError(f"{checkpoint.folder / CONFIG} must list the target's layers it reads; got {listed!r}")
    return tuple(layer + shift for layer in listed)


def _refuse_other_kinds(checkpoint: Checkpoint) -> None:
    for name in sorted(checkpoint.names):
        kind = next((kind for prefix, kind in OTHER_KINDS.items() if name.startswith(prefix)), None)
        if kind is not None:
            raise ValueError(f"{checkpoint.folder} holds tensor {name!r}: it is a {kind} drafter, not supported")
    if not is_dflash(checkpoint.config):
        kind = checkpoint.config.get("speculators_model_type") or checkpoint.config.get("architectures")
        raise ValueError(
            f"{checkpoint.folder / CONFIG} is not that of a DFlash drafter but of {kind!r}: expected "
            "speculators_model_type 'dflash', or a dflash_config"
        )
    if checkpoint.config.get("sample_from_anchor"):
        raise ValueError(f"{checkpoint.folder / CONFIG}: sample_from_anchor is not supported")


def _check_taps(checkpoint: Checkpoint, taps: tuple[int, ...], target_layers: int) -> None:
    where = f"{checkpoint.folder / CONFIG} reads the target's states after layers {taps}"
    if not all(1 <= tap <= target_layers for tap in taps):
        raise ValueError(f"{where}; this target has layers 1 to {target_layers}: it is a drafter for another target")
    if target_layers in taps and "speculators_model_type" in checkpoint.config:
        raise ValueError(
            f"{where}, the last one's before the final norm, and here states after the last layer are normed: "
            f"use a drafter that reads layers below {target_layers}"
        )


def _option(checkpoint: Checkpoint, name: str, default: Any = None) -> Any:
    """Return an option, which may be at the top level or in `dflash_config`."""
    inner = checkpoint.config.get("dflash_config")
    outer = checkpoint.config.get(name, default)
    return inner.get(name, outer) if isinstance(inner, dict) else outer


def _whole(checkpoint: Checkpoint, name: str, least: int) -> int:
    value = _option(checkpoint, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{checkpoint.folder / CONFIG}: {name} must be a whole number ≥ {least}; got {value!r}")
    return value


def _number(checkpoint: Checkpoint, name: str, default: float) -> float:
    value = _option(checkpoint, name)
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"{checkpoint.folder / CONFIG}: {name} must be a finite number; got {value!r}")
    return default if value is None else float(value)


def _shape(checkpoint: Checkpoint, config: PreTrainedConfig, taps: tuple[int, ...], width: int) -> DFlashShape:
    kinds = config.layer_types or ["full_attention"] * config.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not config.sliding_window:
        raise ValueError(
            f"{checkpoint.folder / CONFIG} has layers with sliding_attention, and no sliding_window, the tokens that "
            "they see: get it again"
        )
    causal: Any = checkpoint.config.get("is_causal")
    if checkpoint.config.get("sliding_window_non_causal"):
        causal = False
    return DFlashShape(
        layer=LayerShape.of(config),
        taps=taps,
        target_hidden=width,
        block=_whole(checkpoint, "block_size", 2),
        mask_token=_whole(checkpoint, "mask_token_id", 0),
        windows=tuple(config.sliding_window if slides else None for slides in sliding),
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        embedding_scale=_number(checkpoint, "input_embedding_scale", 1.0),
        output_scale=_number(checkpoint, "output_multiplier", 1.0),
        softcap=_number(checkpoint, "final_logit_softcapping", 0.0),
    )
