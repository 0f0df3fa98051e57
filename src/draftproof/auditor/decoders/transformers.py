"""Audit transformers' `generate`: plain, with a draft model of the same or another tokenizer, with prompt lookup."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

LOOKUP_TOKENS: Final = 10
"""Tokens that prompt lookup copies: the number in transformers' documentation."""

UNSUPPORTED: Final = ("presence_penalty", "frequency_penalty")
"""Sampling parameters that `generate` does not have; its repetition penalty is a different one."""


@dataclass(frozen=True, slots=True)
class Generate:
    """A decoder that calls `model.generate` one prompt at a time, as assisted generation requires.

    Only `sampling` shapes the distribution: the model's generation config is replaced for the call, except for its
    end-of-text tokens. Rounds are counted by wrapping the candidate generator.
    """

    model: Any
    name: str
    extra: dict[str, Any] = field(default_factory=dict)
    description: dict[str, str] = field(default_factory=dict)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        options = generate_options(sampling)
        return [self._generate(list(p), options, max_tokens, s) for p, s in zip(prompts, seeds, strict=True)]

    def _generate(self, prompt: list[int], options: dict[str, Any], max_tokens: int, seed: int) -> Decoded:
        ids = torch.tensor([prompt], device=self.model.device)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _default_config(self.model) as ends, _counted_rounds(self.model) as rounds:
            torch.manual_seed(seed)
            with _explained():
                output = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    eos_token_id=ends or None,
                    pad_token_id=ends[0] if ends else 0,
                    **options,
                    **self.extra,
                )
        tokens = tuple(output[0, len(prompt) :].tolist())
        return Decoded(tokens, tuple(rounds) if self.extra else tuple(Round(0, 0) for _ in tokens))


def transformers_plain(model: Any) -> Generate:
    """Make a decoder of plain `generate`, without drafts."""
    return Generate(model, "transformers", description=_versions())


def transformers_assisted(model: Any, assistant: Any) -> Generate:
    """Make a decoder of `generate` with a draft model; the assistant's generation config sets the draft length."""
    described = _versions() | _draft_settings(assistant)
    return Generate(model, "transformers, assisted", {"assistant_model": assistant}, described)


def transformers_universal(model: Any, assistant: Any, tokenizer: Any, assistant_tokenizer: Any) -> Generate:
    """Make a decoder of `generate` with a draft model that has another tokenizer (universal assisted generation).

    To bet on the drafts, audit it with drafter=`TranslatedReference(assistant, tokenizer, assistant_tokenizer, V)`.
    """
    sizes = [each.config.get_text_config().vocab_size for each in (model, assistant)]
    if sizes[0] == sizes[1]:
        raise ValueError(
            f"target and assistant both have a vocabulary of {sizes[0]}: transformers' generate then takes no second "
            "tokenizer; audit transformers_assisted (--engine transformers-assisted)"
        )
    # generate cuts down the assistant's output layer in place, and finds its work again by the identity of the
    # tokenizers. On copies, the caller's models stay as they are; the weights are shared.
    weights = {id(weight): weight for weight in assistant.parameters()}
    extra = {
        "assistant_model": deepcopy(assistant, weights),
        "tokenizer": deepcopy(tokenizer),
        "assistant_tokenizer": deepcopy(assistant_tokenizer),
    }
    return Generate(model, "transformers, universal assisted", extra, _versions() | _draft_settings(assistant))


def _draft_settings(assistant: Any) -> dict[str, str]:
    """Return the settings of the assistant's generation config that determine what is drafted."""
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    settings = {name: getattr(assistant.generation_config, name, None) for name in names}
    return {name: str(value) for name, value in settings.items() if value is not None}


def transformers_lookup(model: Any, n: int = LOOKUP_TOKENS) -> Generate:
    """Make a decoder of `generate` with prompt lookup of n tokens."""
    if n < 1:
        raise ValueError(f"prompt lookup copies n ≥ 1 tokens; got {n}")
    settings = {"prompt_lookup_num_tokens": str(n)}
    return Generate(model, "transformers, prompt lookup", {"prompt_lookup_num_tokens": n}, _versions() | settings)


def generate_options(sampling: SamplingParams) -> dict[str, Any]:
    """Translate sampling parameters to `generate`'s; all are set, as its defaults may differ (top_k is 50)."""
    refused = [name for name in UNSUPPORTED if getattr(sampling, name)]
    if refused:
        raise ValueError(
            f"transformers' generate has no {' and no '.join(refused)}: leave it out, or audit a decoder that has it"
        )
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0, "repetition_penalty": None, "sequence_bias": None}
    if sampling.repetition_penalty != 1:
        options["repetition_penalty"] = float(sampling.repetition_penalty)
    if sampling.logit_bias:
        options["sequence_bias"] = {(token,): float(bias) for token, bias in sampling.logit_bias.items()}
    if sampling.temperature > 0:
        options |= {
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k or 0,
            "top_p": float(sampling.top_p),
            "min_p": float(sampling.min_p) or None,
        }
    return options


def _versions() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


@contextmanager
def _explained() -> Iterator[None]:
    """Explain a failure of transformers 5.22: it misses an attribute if the target has every word of the assistant."""
    try:
        yield
    except AttributeError as error:
        if error.name != "assistant_overlap_token_ids":
            raise
        raise RuntimeError(
            "transformers' generate failed: it cannot sample with an assistant of another tokenizer if the target has "
            f"every word of the assistant ({error})"
        ) from error


@contextmanager
def _default_config(model: Any) -> Iterator[list[int]]:
    """Replace the model's generation config by the default one, and yield its end-of-text tokens."""
    from transformers import GenerationConfig

    config = model.generation_config
    ends = config.eos_token_id
    model.generation_config = GenerationConfig()
    try:
        yield [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    finally:
        model.generation_config = config


@contextmanager
def _counted_rounds(model: Any) -> Iterator[list[Round]]:
    """Wrap the model's candidate generator, and yield a list that fills with what each round drafts and accepts."""
    rounds: list[Round] = []
    make = model._get_candidate_generator

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        propose, update = generator.get_candidates, generator.update_candidate_strategy
        drafted = [0]

        def get_candidates(input_ids: Any, *rest: Any, **more: Any) -> Any:
            answer = propose(input_ids, *rest, **more)
            drafted[0] = answer[0].shape[1] - input_ids.shape[1]
            return answer

        def update_candidate_strategy(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            rounds.append(Round(drafted[0], int(num_matches)))
            return update(input_ids, scores, num_matches)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
        return generator

    model._get_candidate_generator = wrapped
    try:
        yield rounds
    finally:
        del model._get_candidate_generator
