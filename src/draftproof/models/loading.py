"""Load transformers models by name, folder or object, and wrap them as a `Model`."""

import warnings
from collections.abc import Collection, Mapping
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
    """Return a transformers model or a `Llama`, and its tokenizer if it is loaded by name; an object is not changed."""
    if not isinstance(spec, (str, Path)):
        return spec, None
    device = default_device(options)
    check_device(device, f"device={options.device!r}")
    dtype = options.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if str(spec) == bundled.NAME:
        weights, file = fetch_bundled(options)
        hf, tokenizer = bundled.load(weights=file)
        if file == "int4":
            return hf, tokenizer
        hf = hf.to(device=device, dtype=dtype)
    else:
        weights = chosen_weights(str(spec), options, device)
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


def chosen_weights(name: str, options: LoadOptions, device: torch.device) -> str:
    """Return the kind of weights that a model is loaded with: "float32" stands for its own, in `dtype`.

    "auto" is the four bits that the bundled model's file holds, where this CPU multiplies them fast and neither a dtype
    nor `pack=False` asks for the model's own weights; else float32. Where four or eight bits are asked for and cannot
    be served, float32 is taken, with a warning.
    """
    auto = options.weights == "auto"
    holds_int4 = name == bundled.NAME and options.dtype is None and options.pack
    if options.weights == "float32" or (auto and not holds_int4):
        return "float32"
    from draftproof.models import cpu_support

    refusal = f"they are for CPUs, and the model is on {device}" if device.type != "cpu" else cpu_support.int4_refusal()
    if refusal is None:
        return "int4" if auto else options.weights
    if auto:
        return "float32"
    warnings.warn(f"weights={options.weights!r} are not used: {refusal}. The model is loaded as it is", stacklevel=2)
    return "float32"


def fetch_bundled(options: LoadOptions) -> tuple[str, str]:
    """Get the files of the bundled model if they are missing; return its kind of weights, and that of its files.

    Where the files for "int4" cannot be downloaded and those for "float32" are here, "auto" takes these, with a
    warning.
    """
    weights = chosen_weights(bundled.NAME, options, default_device(options))
    file = "int4" if weights == "int4" else "float32"
    try:
        if not bundled.is_cached(file):
            bundled.fetch(weights=file)
    except bundled.UnavailableError as error:
        if file == "float32" or not bundled.is_cached("float32"):
            raise
        if options.weights == "int4":
            raise bundled.UnavailableError(f"{error} Or load what this machine has: weights='float32'.") from error
        warnings.warn(
            f"{bundled.NAME} is loaded from its float32 files, which is slower and takes more memory: its four-bit "
            "file is not here and could not be downloaded (draftproof models fetch)",
            stacklevel=2,
        )
        return "float32", "float32"
    return weights, file


def _from_pretrained(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Tokenizer]:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from draftproof.models.fused import lay_side_by_side

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither {bundled.NAME!r} (bundled), a model folder nor a hub id that can be reached: {error}"
        ) from error
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, report = family.from_pretrained(
            name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"the weights of {name!r} cannot be read: {error}. The checkpoint is incomplete or damaged: get it again"
        ) from error
    _check_complete(name, model, report)
    model = model.to(device).eval()
    if device.type == "cuda":
        lay_side_by_side(model)  # nobody else holds this model, and an 8B model's merged weights take 9 GB
    return model, AutoTokenizer.from_pretrained(name)


def _check_complete(name: str, model: Any, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is not the whole model: transformers would fill the rest with random numbers."""
    faults = {tensor: "is missing" for tensor in report["missing_keys"]}
    faults |= {tensor: f"has shape {list(found)}" for tensor, found, _ in report["mismatched_keys"]}
    if not faults:
        return
    tensor = min(faults)
    wanted = model.state_dict().get(tensor)  # None where a quantiser has renamed it
    shape = "" if wanted is None else f", of shape {list(wanted.shape)} in the model,"
    raise ValueError(
        f"{name!r} is not a whole {type(model).__name__}: tensor {tensor!r}{shape} {faults[tensor]} ({len(faults)} "
        "such). Get the checkpoint again; if it is a published drafter, put its kind before its name, as in "
        "'eagle3:name'"
    )


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
    from draftproof.models.llama_model import LlamaModel

    if (lean := LlamaModel.of(hf)) is not None:
        return lean
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
