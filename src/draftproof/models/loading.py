"""Load transformers models by name, folder or object, and wrap them as a `Model`."""

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from draftproof.models import bundled
from draftproof.models.compatibility import check_device
from draftproof.models.fingerprint import PerModel, fingerprint
from draftproof.models.interface import Model
from draftproof.models.tokenizer import Tokenizer

WEIGHTS: Final = ("auto", "float32", "int4", "int8")
"""Kinds of weights that a model can be loaded with."""

_WRAPPED: PerModel[Model] = PerModel()
"""The wrapper of each model that is alive: making one copies modules and may probe the model."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How models are loaded by name.

    device, dtype  default: CUDA in bfloat16 if there is one, else the CPU in float32
    pack           lay out the weights for the CPU
    graphs         on a GPU, record short passes and replay them
    weights        one of WEIGHTS
    """

    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    pack: bool = True
    graphs: bool = True
    weights: str = "auto"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}; got {self.weights!r}")


def load_model(spec: Any, options: LoadOptions) -> tuple[Any, Tokenizer | None]:
    """Return a transformers model and, where it was loaded by name, its tokenizer. An object is returned as it is."""
    if not isinstance(spec, (str, Path)):
        return spec, None
    device = default_device(options)
    check_device(device, f"device={options.device!r}")
    dtype = options.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = chosen_weights(options, device)
    if str(spec) == bundled.NAME and weights == "int4":
        return bundled.load(weights=weights)
    if str(spec) == bundled.NAME:
        hf, tokenizer = bundled.load()
        hf = hf.to(device=device, dtype=dtype)
    else:
        hf, tokenizer = _from_pretrained(str(spec), device, dtype)
    if weights != "float32":
        from draftproof.models.quantised import quantise

        hf.quantisation_error = quantise(hf, weights)
    elif options.pack:
        from draftproof.models.cpu_linear import pack, packable

        if packable(hf):
            pack(hf)
    return hf, tokenizer


def default_device(options: LoadOptions) -> torch.device:
    """Return the device that models are loaded on: the one asked for, else CUDA if there is one, else the CPU."""
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def chosen_weights(options: LoadOptions, device: torch.device) -> str:
    """Return the kind of weights that a model is loaded with: "float32" stands for its own, in `dtype`.

    "auto" is float32. Where four or eight bits are asked for and cannot be served, float32 is taken, with a warning.
    """
    if options.weights in ("auto", "float32"):
        return "float32"
    from draftproof.models.cpu_support import int4_refusal

    refusal = f"they are for CPUs, and the model is on {device}" if device.type != "cpu" else int4_refusal()
    if refusal is None:
        return options.weights
    warnings.warn(f"weights={options.weights!r} are not used: {refusal}. The model is loaded as it is", stacklevel=2)
    return "float32"


def _from_pretrained(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Tokenizer]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither {bundled.NAME!r} (bundled), a model folder nor a hub id that can be reached: {error}"
        ) from error
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_pretrained(name, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)


def as_model(hf: Any, role: str = "target", graphs: bool = True) -> Model:
    """Wrap a transformers model as a `Model`; a `Model` is returned as it is.

    A wrapper is made once, and again after the model has changed in a way that the wrapper does not follow
    (fingerprint.py).
    """
    config = getattr(hf, "config", None)
    if config is None:
        if isinstance(hf, Model):
            return hf
        raise ValueError(f"{role} must be a name, a folder, a transformers model or a Model; got a {type(hf).__name__}")
    drafter = role == "drafter"
    return _WRAPPED.get(hf, role, (graphs, fingerprint(hf)), lambda: _wrapped(hf, graphs, drafter))


def _wrapped(hf: Any, graphs: bool, drafter: bool) -> Model:
    if hf.config.is_encoder_decoder:
        from draftproof.models.encoder_decoder import EncoderDecoder

        return EncoderDecoder(hf, drafter=drafter)
    from draftproof.models.compatibility import has_recurrent_layers
    from draftproof.models.hf import HFModel

    if has_recurrent_layers(hf) and not drafter:  # a draft takes a pass for each token; replay undoes one pass
        from draftproof.models.hybrid import HybridModel

        return HybridModel(hf)
    return HFModel(hf, graphs=graphs, drafter=drafter)


def eos_tokens(hf: Any, tokenizer: Any) -> Collection[int]:
    """Return every token that ends a text, by the model's generation settings or else by its tokenizer."""
    settings = getattr(getattr(hf, "generation_config", None), "eos_token_id", None)
    if settings is None:
        settings = getattr(tokenizer, "eos_token_id", None)
    if settings is None:
        return ()
    return {int(settings)} if isinstance(settings, int) else {int(token) for token in settings}
