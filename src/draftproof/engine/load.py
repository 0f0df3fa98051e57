"""Load an engine: names, folders and loaded models become one, or are refused with the reason."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch

from draftproof.drafters.interface import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.registry import AUTO, NAMES, default_branches, is_name, resolve, split_way
from draftproof.drafters.slem import SLEM
from draftproof.drafters.tli import TLI
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.models import bundled
from draftproof.models.compatibility import same_vocabulary
from draftproof.models.interface import Model
from draftproof.models.loading import LoadOptions, as_model, eos_tokens, load_model
from draftproof.models.tokenizer import Tokenizer
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from draftproof.rules import Verifier

TLI_SHARE: Final = 0.9
"""Share of the target's tokens that a draft model with another tokenizer must have to draw drafts (TLI) by default.
Acceptance falls fast below it: 61, 25 and 15 % were reported at 99.8, 79.8 and 69.6 % (vllm#38174)."""


def load(
    target: Any = bundled.NAME,
    drafter: Any = AUTO,
    *,
    rule: str | Verifier = "block",
    num_draft_tokens: int | str = "auto",
    tokenizer: Tokenizer | None = None,
    draft_tokenizer: Tokenizer | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    max_batch: int = 8,
    max_length: int | None = None,
    kv_memory: int | float = 0.25,
    max_prefill_tokens: int | None = None,
    branches: int | None = None,
    pack: bool = True,
    graphs: bool = True,
    weights: str = "auto",
) -> Engine:
    """Make an engine.

    target            "smollm2" (bundled), a folder, a hub id, or a loaded transformers model (causal, or with encoder)
    drafter           None (plain decoding), "ngram", "prompt-lookup", "suffix", "early-exit:6", "head" (of the bundled
                      model) or "head:folder", "suffix+head" (either, by the row), "eagle3:folder" or "dflash:folder" (a
                      published drafter; the folder alone will do), "mtp" (a layer of the target's checkpoint), a
                      smaller model's name, folder or object, or any `Drafter`. "auto" is the head where one is shipped
                      for the target, else "ngram".
                      A model with another tokenizer drafts by TLI if it has 90 % of the target's tokens, otherwise
                      by SLEM for greedy requests; "tli:MODEL" or "slem:MODEL" chooses
    rule              "block", "token", "coupled", "tree", or a verifier
    num_draft_tokens  "auto", or a number. With "auto", a head on a CPU also ends a greedy draft where it is unsure
    tokenizer         the target's tokenizer, if the target is an object; `draft_tokenizer` is that of a draft model
    device, dtype     for models loaded here; default: CUDA if there is one, else the CPU in float32
    max_batch         rows that advance together; more requests wait
    max_length        most tokens of a text, prompt counted; default: the model's own limit
    kv_memory         memory of the KV pools on a CPU: bytes, or a share of what is free; it is taken as it is used
    max_prefill_tokens  tokens of prompts read beside decoding rows in one round; default: 64 of each, 512 in all
    branches          candidates at a node for rule="tree"; default 2 there (prompt-lookup: 1), and 1 elsewhere
    pack              lay out the weights of models loaded here for the CPU: a draft is then scored in about the time
                      of one token, for as much memory again as the output head
    graphs            on a GPU, record short passes and replay them: a pass takes longer to launch than to run
    weights           "float32" (the model's own, in `dtype`), "int4" or "int8": quantised for the CPU when loaded by
                      name; the text then has the quantised model's distribution. "auto" is int4 for the bundled model,
                      whose file holds four bits, where the CPU has the instructions and no `dtype` is given, else
                      float32

    A model object that is passed in is never altered, and stays on its device.
    """
    limits = Limits(max_batch, max_length, kv_memory, max_prefill_tokens)
    options = LoadOptions(device, dtype, pack, graphs, weights)
    hf, loaded_tokenizer = load_model(target, options)
    tokenizer = tokenizer or loaded_tokenizer
    model = as_model(hf, graphs=graphs)
    branches = default_branches(drafter, rule) if branches is None else branches
    return Engine(
        model,
        tokenizer,
        as_drafter(
            drafter,
            model,
            options,
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
            branches=branches,
            confidence="auto" if num_draft_tokens == "auto" else 0.0,
            hf=hf,
        ),
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        eos=eos_tokens(hf, tokenizer),
        limits=limits,
        hf=hf,
    )


def as_drafter(
    spec: Any,
    target: Model,
    options: LoadOptions,
    *,
    tokenizer: Tokenizer | None = None,
    draft_tokenizer: Tokenizer | None = None,
    branches: int = 1,
    confidence: float | str = 0.0,
    hf: Any = None,
) -> Drafter | None:
    """Make a drafter from a user's argument: a name, a model or a `Drafter`. `hf` is the target in transformers."""
    spec = str(spec) if isinstance(spec, Path) else spec
    if spec is None or (isinstance(spec, str) and is_name(spec)) or isinstance(spec, Drafter):
        return resolve(spec, target, branches=branches, confidence=confidence, hf=hf)
    how, spec = split_way(spec)
    try:
        its_hf, loaded_tokenizer = load_model(spec, options)
    except ValueError as error:
        raise ValueError(f"{error}{_drafter_hint(spec)}") from error
    model = as_model(its_hf, "drafter", options.graphs)
    draft_tokenizer = draft_tokenizer or loaded_tokenizer
    if how is None and same_vocabulary(target, model, tokenizer, draft_tokenizer):
        return ModelDrafter(model, vocab_size=target.vocab_size, branches=branches)
    return _with_other_tokenizer(how, model, target, tokenizer, draft_tokenizer, branches)


def _with_other_tokenizer(
    how: str | None,
    model: Model,
    target: Model,
    tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
    branches: int,
) -> Drafter:
    """Make a drafter of a model with another tokenizer: by TLI or SLEM, or by what the vocabularies have in common."""
    if tokenizer is None or draft_tokenizer is None:
        raise ValueError(
            f"drafter {how!r} needs the tokenizers of both models: pass tokenizer= and draft_tokenizer= if a model is "
            "not loaded by name"
        )
    overlap = VocabularyOverlap.of(
        tokenizer, draft_tokenizer, vocab_size=target.vocab_size, draft_vocab_size=model.vocab_size
    )
    if how == "tli" or (how is None and overlap.share >= TLI_SHARE):
        return TLI(model, overlap, vocab_size=target.vocab_size, branches=branches)
    return SLEM(model, overlap, greedy_only=how is None)


def _drafter_hint(spec: Any) -> str:
    """Return the drafters by name, and the one that was probably meant."""
    near = get_close_matches(str(spec), NAMES, 1, 0.5)
    meant = f"; did you mean drafter={near[0]!r}?" if near else ""
    plain = " (plain decoding is drafter=None)" if str(spec).lower() in ("none", "plain", "off") else ""
    return f". Drafters by name: {', '.join(NAMES)}{plain}{meant}"
