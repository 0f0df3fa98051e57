"""Run beam search by transformers. It does not sample, and drafting does not speed it up."""

from collections.abc import Mapping
from typing import Any

import torch

from draftproof.core.sampling import is_whole
from draftproof.engine.request import Output, Stats


def beam_search(
    model: Any, tokenizer: Any, prompt: list[int], max_tokens: int, num_beams: int, length_penalty: float
) -> Output:
    """Return the best of `num_beams` hypotheses for one prompt."""
    if not hasattr(model, "generate"):
        raise ValueError(
            f"num_beams={num_beams} hands over to transformers, and this target is not a transformers model"
        )
    ids = torch.tensor([prompt], device=model.device)
    sequences = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        num_beams=num_beams,
        length_penalty=length_penalty,
        do_sample=False,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    tokens = sequences[0, start:].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else ""
    stats = Stats(emitted=len(tokens), rounds=len(tokens))
    return Output(text, tokens, "length" if len(tokens) >= max_tokens else "stop", stats)


def check_beams(num_beams: Any, ignored: Mapping[str, Any]) -> None:
    """Refuse a number of beams that is not one, and options that beam search would ignore."""
    if not is_whole(num_beams) or num_beams < 1:
        raise ValueError(f"num_beams must be a whole number ≥ 1; got {num_beams!r}")
    given = [name for name, value in ignored.items() if value is not None]
    if given:
        raise ValueError(f"num_beams={num_beams} is beam search, which does not use {', '.join(given)}: leave it out")
