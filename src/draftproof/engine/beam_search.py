"""Run beam search by transformers. It does not sample, and drafting does not speed it up."""

from typing import Any

import torch

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
