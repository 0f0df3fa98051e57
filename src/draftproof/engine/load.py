"""The door: names, folders and loaded models become an engine, or a refusal with its reason."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from draftproof.core.types import InexactError
from draftproof.drafters.interface import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.registry import AUTO, default_branches, is_name, resolve
from draftproof.engine.engine import Engine, Limits
from draftproof.models import bundled
from draftproof.models.interface import Model
from draftproof.models.tokenizer import Tokenizer
from draftproof.rules import Verifier


def load(
    target: Any = bundled.NAME,
    drafter: Any = AUTO,
    *,
    rule: str | Verifier = "block",
    num_draft_tokens: int | str = "auto",
    tokenizer: Tokenizer | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    branches: int | None = None,
    pack: bool = True,
    graphs: bool = True,
) -> Engine:
    """Make an engine.

    target            "smollm2" (bundled), a folder, a hub id, or a loaded transformers model (causal, or with encoder)
    drafter           None (plain decoding), "ngram", "prompt-lookup", "suffix", "early-exit:6", "head" (of the bundled
                      model) or "head:folder", "suffix+head" (either, by the row), a smaller model's name, folder or
                      object, or any `Drafter`. "auto" is the head where one is shipped for the target, else "ngram"
    rule              "block", "token", "coupled", "tree", or a verifier
    num_draft_tokens  "auto", or a number
    device, dtype     for models loaded here; default: CUDA if there is one, else the CPU in float32
    max_batch         rows that advance together; more requests wait
    max_length        most tokens of a text, prompt counted; default: the model's own limit
    branches          candidates at a node for rule="tree"; default 2 there (prompt-lookup: 1), and 1 elsewhere
    pack              lay out the weights of models loaded here for the CPU: a draft is then scored in about the time
                      of one token, for as much memory again as the output head
    graphs            on a GPU, record short passes and replay them: a pass takes longer to launch than to run

    A model object that is passed in is never altered, and stays on its device.
    """
    limits = Limits(max_batch, max_length)
    hf, words = _loaded(target, device, dtype, pack)
    model = as_model(hf, graphs=graphs)
    words = tokenizer or words
    branches = default_branches(drafter, rule) if branches is None else branches
    made = as_drafter(drafter, model, words, branches, (device, dtype, pack), hf, graphs)
    return Engine(
        model, words, made, rule=rule, num_draft_tokens=num_draft_tokens, eos=_eos(hf, words), limits=limits, hf=hf
    )


def _loaded(spec: Any, device: Any, dtype: Any, packing: bool) -> tuple[Any, Tokenizer | None]:
    """A transformers model and, where we know it, its tokenizer."""
    if not isinstance(spec, (str, Path)):
        return spec, None
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    if str(spec) == bundled.NAME:
        hf, words = bundled.load()
        hf = hf.to(device=place, dtype=dtype)
    else:
        hf, words = _from_pretrained(str(spec), place, dtype)
    if packing:
        from draftproof.models.cpu_linear import pack, packable

        if packable(hf):
            pack(hf)
    return hf, words


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
    """A transformers model as ours; a `Model` is taken as it is."""
    config = getattr(hf, "config", None)
    if config is None:
        if isinstance(hf, Model):
            return hf
        raise ValueError(f"{role} must be a name, a folder, a transformers model or a Model; got a {type(hf).__name__}")
    if config.is_encoder_decoder:
        from draftproof.models.encoder_decoder import EncoderDecoder

        return EncoderDecoder(hf)
    from draftproof.models.hf import HFModel

    return HFModel(hf, graphs=graphs)


def as_drafter(
    spec: Any,
    target: Model,
    words: Tokenizer | None,
    branches: int,
    how: tuple[Any, Any, bool],
    its_hf: Any = None,
    graphs: bool = True,
) -> Drafter | None:
    """A drafter of whatever a user wrote. `its_hf` is the target as transformers knows it."""
    if spec is None or (isinstance(spec, str) and is_name(spec)) or isinstance(spec, Drafter):
        return resolve(spec, target, branches=branches, hf=its_hf)
    hf, its_words = _loaded(spec, *how)
    model = as_model(hf, "drafter", graphs)
    _check_vocabularies(target, model, words, its_words)
    return ModelDrafter(model, vocab_size=target.vocab_size, branches=branches)


def _check_vocabularies(target: Model, drafter: Model, words: Any, its_words: Any) -> None:
    """The same ids must mean the same tokens. Different padding is fine; different tokens are not."""
    if its_words is None or words is None:
        near = abs(target.vocab_size - drafter.vocab_size) <= 1024  # padded to another multiple
        if not near:
            raise InexactError(
                f"the drafter scores {drafter.vocab_size} tokens and the target {target.vocab_size}: their "
                "vocabularies differ, and there is no mapping. Use a drafter of the same family"
            )
        return
    one, other = words.get_vocab(), its_words.get_vocab()
    wrong = next((t for t, i in other.items() if one.get(t, i) != i), None)
    shared = sum(one.get(t) == i for t, i in other.items())
    if wrong is not None or shared < 0.9 * min(len(one), len(other)):
        raise InexactError(
            f"drafter and target have different vocabularies ({shared} of {len(one)} tokens agree, {wrong!r} does "
            "not): use a drafter of the same family"
        )


def _eos(hf: Any, words: Any) -> Collection[int]:
    """Every token that ends a text, by the model's generation settings or else by its tokenizer."""
    settings = getattr(getattr(hf, "generation_config", None), "eos_token_id", None)
    if settings is None:
        settings = getattr(words, "eos_token_id", None)
    if settings is None:
        return ()
    return {int(settings)} if isinstance(settings, int) else {int(token) for token in settings}
