"""transformers' own `generate` as a decoder: plain, assisted by a draft model, and by prompt lookup."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

LOOKUP: Final = 10
"""Tokens that prompt lookup copies: the number of transformers' own documentation."""

NO_EQUAL: Final = ("presence_penalty", "frequency_penalty")
"""What `generate` has no name for. Its repetition penalty is another thing."""


@dataclass(frozen=True, slots=True)
class Generate:
    """`model.generate`, one prompt at a time: that is all its assisted decoding takes.

    The distribution asked for is that of `sampling` alone: the model's own generation settings are put aside for the call, but
    for the tokens that end a text. A round's drafts are counted from outside, by watching its candidate generator.
    """

    model: Any
    name: str
    extra: dict[str, Any] = field(default_factory=dict)
    description: dict[str, str] = field(default_factory=dict)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        options = settings(sampling)
        return [self._said(list(p), options, max_tokens, s) for p, s in zip(prompts, seeds, strict=True)]

    def _said(self, prompt: list[int], options: dict[str, Any], max_tokens: int, seed: int) -> Decoded:
        ids = torch.tensor([prompt], device=self.model.device)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _settings_aside(self.model) as ends, _watched(self.model) as rounds:
            torch.manual_seed(seed)
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **options,
                **self.extra,
            )
        tokens = tuple(made[0, len(prompt) :].tolist())
        return Decoded(tokens, tuple(rounds) if self.extra else tuple(Round(0, 0) for _ in tokens))


def transformers_plain(model: Any) -> Generate:
    """`generate` on its own: nothing is drafted."""
    return Generate(model, "transformers", description=_versions())


def transformers_assisted(model: Any, assistant: Any) -> Generate:
    """`generate` with a draft model. How much it drafts is set in the assistant's own generation settings."""
    own = assistant.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    told = {name: str(getattr(own, name)) for name in names if getattr(own, name, None) is not None}
    return Generate(model, "transformers, assisted", {"assistant_model": assistant}, _versions() | told)


def transformers_lookup(model: Any, n: int = LOOKUP) -> Generate:
    """`generate` with prompt lookup of n tokens."""
    if n < 1:
        raise ValueError(f"prompt lookup copies n ≥ 1 tokens; got {n}")
    told = {"prompt_lookup_num_tokens": str(n)}
    return Generate(model, "transformers, prompt lookup", {"prompt_lookup_num_tokens": n}, _versions() | told)


def settings(sampling: SamplingParams) -> dict[str, Any]:
    """This sampling by `generate`'s names. All are said: what is left out may be anything (top_k is 50)."""
    refused = [name for name in NO_EQUAL if getattr(sampling, name)]
    if refused:
        raise ValueError(
            f"transformers' generate has no {' and no '.join(refused)}: leave it out, or audit a decoder that has it"
        )
    made: dict[str, Any] = {"do_sample": sampling.temperature > 0, "repetition_penalty": None, "sequence_bias": None}
    if sampling.repetition_penalty != 1:
        made["repetition_penalty"] = float(sampling.repetition_penalty)
    if sampling.logit_bias:
        made["sequence_bias"] = {(token,): float(bias) for token, bias in sampling.logit_bias.items()}
    if sampling.temperature > 0:
        made |= {
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k or 0,
            "top_p": float(sampling.top_p),
            "min_p": float(sampling.min_p) or None,
        }
    return made


def _versions() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


@contextmanager
def _settings_aside(model: Any) -> Iterator[list[int]]:
    """Put the model's generation settings aside, and say which tokens end a text by them."""
    from transformers import GenerationConfig

    own = model.generation_config
    ends = own.eos_token_id
    model.generation_config = GenerationConfig()
    try:
        yield [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    finally:
        model.generation_config = own


@contextmanager
def _watched(model: Any) -> Iterator[list[Round]]:
    """What each round drafts and keeps: the candidate generator is asked for one and told of the other."""
    rounds: list[Round] = []
    make = model._get_candidate_generator

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        propose, told = made.get_candidates, made.update_candidate_strategy
        drafted = [0]

        def get_candidates(input_ids: Any, *rest: Any, **more: Any) -> Any:
            answer = propose(input_ids, *rest, **more)
            drafted[0] = answer[0].shape[1] - input_ids.shape[1]
            return answer

        def update_candidate_strategy(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            rounds.append(Round(drafted[0], int(num_matches)))
            return told(input_ids, scores, num_matches)

        made.get_candidates, made.update_candidate_strategy = get_candidates, update_candidate_strategy
        return made

    model._get_candidate_generator = watched
    try:
        yield rounds
    finally:
        del model._get_candidate_generator
