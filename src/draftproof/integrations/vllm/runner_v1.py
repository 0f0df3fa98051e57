"""Verify drafts in vLLM's model runner V1: the CPU's, and CUDA's where V2 does not serve.

`RejectionSampler.forward` gets raw target logits with the rows of a request adjacent, and draft probabilities where the
drafts were drawn. A draft token of -1 ends its draft. The result is the plain sampler's distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import to_device
from draftproof.core.distribution import Distribution
from draftproof.core.filters import argmax
from draftproof.core.rng import Philox
from draftproof.core.sampling import GREEDY_BELOW, SamplingParams
from draftproof.core.types import PAD, Draft
from draftproof.integrations.vllm.hooks import Hook, Hooks, Inventory, RefusedError
from draftproof.integrations.vllm.log import UNTRIED, announce
from draftproof.integrations.vllm.rows import Layout, cut_by_min_p, filtered, needs_history, processed
from draftproof.integrations.vllm.settings import ATTRIBUTE, Settings, settings_of
from draftproof.rules.api import Decision, Scored, decide
from draftproof.rules.token import leading


def _marks_sampler(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from vllm.config import get_current_vllm_config_or_none

        original(self, *args, **kwargs)
        config = get_current_vllm_config_or_none()
        settings = None if config is None else settings_of(config)
        setattr(self, ATTRIBUTE, settings)
        if settings is not None:
            RUNNER.install()
            if RUNNER.problems:
                raise RefusedError(f"draftproof does not know model runner V1 of this vLLM: {RUNNER.problems[0]}")
            announce(settings, "V1", "" if config.device_config.device_type == "cpu" else UNTRIED)

    return __init__


def _verifies(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        settings: Settings | None = getattr(self, ATTRIBUTE, None)
        if settings is None:
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        return sample(self, settings, metadata, draft_probs, logits, sampling_metadata)

    return forward


def _builds_all_processors(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_logitsprocs(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> Any:
        from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

        asked = settings_of(vllm_config) is not None and vllm_config.speculative_config is not None
        if not asked or is_pooling_model or custom_logitsprocs:
            return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        refuse_installed_processors()
        return LogitsProcessors(make(vllm_config, device, is_pin_memory) for make in BUILTIN_LOGITS_PROCESSORS)

    return build_logitsprocs


def refuse_installed_processors() -> None:
    """Refuse to start beside logits processors of other packages.

    vLLM's plain sampler applies them, and verification cannot, as they see one row of each request. vLLM's own
    speculation leaves them out without a word.
    """
    others = [each.name for each in entry_points(group="vllm.logits_processors")]
    if others:
        raise RefusedError(
            f"draftproof cannot verify beside the installed logits processors {others}, which vLLM's plain sampler "
            "applies: uninstall them, or leave the setting 'draftproof' out"
        )


def _gives_structured_requests_chosen_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> Tensor | None:
        probs: Tensor | None = original(self, spec_decode_metadata)
        if probs is None or getattr(self.rejection_sampler, ATTRIBUTE, None) is None:
            return probs
        structured = [is_structured(self.requests[name]) for name in self.input_batch.req_ids]
        counts = spec_decode_metadata.num_draft_tokens
        return chosen(probs, spec_decode_metadata.draft_token_ids, counts, structured) if any(structured) else probs

    return _get_spec_decode_draft_probs


def _fails_rows_without_a_distribution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make requests whose logits are not a distribution emit nothing in steps without drafts.

    vLLM before 0.32 gives such steps to its plain sampler. On a GPU nothing is done: looking at the rows would sync.
    """

    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(getattr(self, "rejection_sampler", None), ATTRIBUTE, None) is not None
        if not ours or spec_decode_metadata is not None or logits is None or logits.device.type != "cpu":
            return original(self, logits, spec_decode_metadata, *args, **kwargs)
        faulty = ~torch.isfinite(logits.amax(-1))  # looked at before: the sampler writes into the logits
        output = original(self, logits, spec_decode_metadata, *args, **kwargs)
        return silenced(output, faulty) if faulty.any() else output

    return _sample


def silenced(output: Any, faulty: Bool[Tensor, " B"]) -> Any:
    """Return vLLM's `SamplerOutput` of one token per request without the tokens of some requests."""
    tokens = with_padding(output.sampled_token_ids.masked_fill(faulty[:, None], PAD))
    logprobs = output.logprobs_tensors
    if logprobs is not None:  # one row for each column of tokens
        names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        logprobs = logprobs._replace(**{name: getattr(logprobs, name).repeat_interleave(2, 0) for name in names})
    return replace(output, sampled_token_ids=tokens, logprobs_tensors=logprobs)


def with_padding(tokens: Int[Tensor, "B J"]) -> Int[Tensor, "B J2"]:
    """Append a column of padding: of a single column vLLM takes every entry for a token, padding too."""
    return torch.nn.functional.pad(tokens, (0, 1), value=PAD)


def is_structured(request: Any) -> bool:
    """Return whether a grammar constrains a request."""
    return getattr(request.sampling_params, "structured_outputs", None) is not None


def chosen(
    probs: Float[Tensor, "M V"], tokens: Int[Tensor, " M"], counts: Sequence[int], which: Sequence[bool]
) -> Float[Tensor, "M V"]:
    """Return draft probabilities with point masses at the draft tokens of some requests.

    vLLM cuts a draft before the first token that a grammar forbids. What is left of drawn drafts is then a selection,
    and no longer a sample of the drafter's distribution: verified as one, texts would be biased. Verified as chosen
    tokens they may be any selection.
    """
    rows = [row for row, of in enumerate(b for b, count in enumerate(counts) for _ in range(count)) if which[of]]
    place = to_device(rows, probs.device)
    probs = probs.clone()
    probs[place] = 0.0
    probs[place, tokens[place].long().clamp_min(0)] = 1.0  # a token of -1 ends its draft: its row is not read
    return probs


_SAMPLER: Final = "vllm.v1.sample.rejection_sampler:RejectionSampler"
_LOGPROBS_PARAMETERS: Final = (
    *("self", "max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids"),
)

SAMPLING: Final = (
    *("temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs", "no_penalties"),
    *("prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties", "output_token_ids"),
    *("allowed_token_ids_mask", "bad_words_token_ids", "logitsprocs", "logprob_token_ids", "spec_token_ids"),
    "thinking_budget_state_holder",
)
"""What vLLM's sampler knows of a batch, in 0.28 to 0.32: all of it is in the verification, or refused."""

HOOKS: Final = Hooks(
    (
        Hook(f"{_SAMPLER}.__init__", ("self", "sampler"), _marks_sampler),
        Hook(f"{_SAMPLER}.forward", ("self", "metadata", "draft_probs", "logits", "sampling_metadata"), _verifies),
        Hook(f"{_SAMPLER}._get_logprobs_tensors", _LOGPROBS_PARAMETERS),
        Hook(
            "vllm.v1.sample.logits_processor:build_logitsprocs",
            ("vllm_config", "device", "is_pin_memory", "is_pooling_model"),
            _builds_all_processors,
            copies=("vllm.v1.worker.gpu_model_runner",),
        ),
        Hook(
            "vllm.v1.sample.ops.penalties:apply_all_penalties",
            (
                *("logits", "prompt_token_ids", "presence_penalties", "frequency_penalties"),
                *("repetition_penalties", "output_token_ids"),
            ),
        ),
        Hook("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", ("logits", "k", "p")),
        Inventory(
            "vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS",
            ("MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor"),
            lambda processors: [each.__name__ for each in processors],
        ),
        Inventory(
            "vllm.v1.sample.metadata:SamplingMetadata",
            SAMPLING,
            lambda metadata: [each.name for each in fields(metadata)],
        ),
    )
)

RUNNER: Final = Hooks(
    (
        Hook(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_spec_decode_draft_probs",
            ("self", "spec_decode_metadata"),
            _gives_structured_requests_chosen_drafts,
        ),
        Hook(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
            ("self", "logits", "spec_decode_metadata"),
            _fails_rows_without_a_distribution,
        ),
    )
)
"""Installed by the runner that makes the sampler: other processes need not load that module."""


def sample(
    sampler: Any,
    settings: Settings,
    metadata: Any,
    draft_probs: Float[Tensor, "M V"] | None,
    logits: Float[Tensor, "N V"],
    sampling: Any,
) -> Any:
    """Return vLLM's `SamplerOutput` of a batch: the tokens each request emits, then -1, and their log-probabilities."""
    from vllm.v1.outputs import SamplerOutput

    layout = Layout(tuple(metadata.num_draft_tokens))
    drafts = layout.padded_tokens(metadata.draft_token_ids)
    history = drafts.tolist() if needs_history(sampling) else [()] * len(drafts)
    rows = processed(logits, layout, history, sampling)
    emitted = emit(settings.rule, rows, layout, drafts, draft_probs, sampling).int()
    if not layout.longest and emitted.device.type == "cpu" and bool((emitted < 0).any()):
        emitted = with_padding(emitted)
    logprobs = None
    if sampling.max_num_logprobs is not None:
        scores = filtered(rows, layout, sampling) if sampler.is_processed_logprobs_mode else logits
        logprobs = sampler._get_logprobs_tensors(
            sampling.max_num_logprobs,
            metadata,
            logits,
            scores[metadata.target_logits_indices.long()],
            scores[metadata.bonus_logits_indices.long()],
            emitted,
        )
    return SamplerOutput(sampled_token_ids=emitted, logprobs_tensors=logprobs)


def emit(
    rule: str,
    rows: Float[Tensor, "N V"],
    layout: Layout,
    drafts: Int[Tensor, "B K"],
    draft_probs: Float[Tensor, "M V"] | None,
    sampling: Any,
) -> Int[Tensor, "B J"]:
    """Verify a batch of ragged rows. A request that reaches a row without a distribution (NaN) emits no token there."""
    rows = cut_by_min_p(rows, layout, sampling)
    if kernels.serves(rows, drafts, rule, draft_probs):
        return _by_kernels(rule, rows, layout, drafts, draft_probs, sampling)
    if sampling.all_greedy and rows.device.type == "cpu":
        return _greedy(rows, layout, drafts)
    return _by_rules(rule, rows, layout, drafts, draft_probs, sampling)


def _greedy(rows: Float[Tensor, "N V"], layout: Layout, drafts: Int[Tensor, "B K"]) -> Int[Tensor, "B J"]:
    """Emit argmax tokens up to the first that was not drafted: every rule's verdict where all p are point masses."""
    best = argmax(rows)
    peak = rows.gather(1, best[:, None])
    sound = torch.isfinite(peak)[:, 0].numpy()
    likeliest, guesses = best.numpy(), drafts.numpy()
    emitted = np.full((len(layout.drafted), layout.longest + 1), PAD)
    for b, (start, count) in enumerate(zip(layout.starts, layout.drafted, strict=True)):
        for j in range(count + 1):
            if not sound[start + j]:
                break
            emitted[b, j] = likeliest[start + j]
            if j == count or guesses[b, j] != likeliest[start + j]:
                break
    return torch.from_numpy(emitted)


def _by_rules(
    rule: str,
    rows: Float[Tensor, "N V"],
    layout: Layout,
    drafts: Int[Tensor, "B K"],
    draft_probs: Float[Tensor, "M V"] | None,
    sampling: Any,
) -> Int[Tensor, "B J"]:
    """Verify by the reference rules, through the same function as `draftproof.verify`."""
    samplings = _samplings(sampling, len(drafts), rows.shape[-1])
    q, drawn = None, None
    if draft_probs is not None:
        q = Distribution.of(layout.padded_drafts(draft_probs.float()))
        warm = [each.temperature > 0 for each in samplings]  # greedy requests have argmax drafts: chosen, not drawn
        if not all(warm):
            drawn = torch.tensor(warm, device=rows.device)[:, None].expand(drafts.shape)
    # a token of -1 cannot stand: the draft ends before it
    draft = Draft(drafts, leading(drafts >= 0), q, drawn)
    seeds = fresh_seeds(sampling, len(drafts), rows.device)
    scored = Scored(layout.padded(rows), samplings, draft)
    return decide(scored, lambda: Philox(seeds, torch.zeros_like(seeds)), rule, _sound_tokens)


def _sound_tokens(decision: Decision) -> Int[Tensor, "B J"]:
    """Return a decision's tokens without those whose position had no distribution."""
    tokens = decision.verdict.tokens
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(place >= decision.sound[:, None], PAD)


def _by_kernels(
    rule: str,
    rows: Float[Tensor, "N V"],
    layout: Layout,
    drafts: Int[Tensor, "B K"],
    draft_probs: Float[Tensor, "M V"] | None,
    sampling: Any,
) -> Int[Tensor, "B J"]:
    """Verify by the Triton kernels, on the rows as they lie and without a sync.

    A request with a faulty row emits nothing.
    """
    B, V, device = len(drafts), rows.shape[-1], rows.device
    nucleus, warm = sampling.top_p is not None, not sampling.all_greedy
    parameters = kernels.Parameters.empty(B, device, filtered=nucleus or sampling.top_k is not None)
    parameters = replace(parameters, warm=warm, nucleus=nucleus)
    if sampling.all_greedy:
        parameters["temperature"].zero_()
    else:
        temperature = sampling.temperature[:B]
        parameters["temperature"].copy_(torch.where(temperature < GREEDY_BELOW, 0.0, temperature))
    if sampling.top_p is not None:
        parameters["top_p"].copy_(sampling.top_p[:B])
    if sampling.top_k is not None:
        parameters["top_k"].copy_(torch.where(sampling.top_k[:B] >= V, 0, sampling.top_k[:B]))
    parameters["seeds"].copy_(fresh_seeds(sampling, B, device))
    parameters["lengths"].copy_(leading(drafts >= 0))
    parameters["target_rows"].copy_(to_device(layout.starts, device))
    parameters["draft_rows"].copy_(to_device([start - b for b, start in enumerate(layout.starts)], device))
    # greedy requests have argmax drafts: a point mass
    parameters["draft_temperature"].copy_((parameters["temperature"] > 0).double())
    draft_logits = None if draft_probs is None else draft_probs.float().log()
    verdict = kernels.verify_rows(rows, drafts.contiguous(), draft_logits, parameters=parameters, rule=rule)
    return verdict.tokens.masked_fill((verdict.faults != 0)[:, None], PAD)


def fresh_seeds(sampling: Any, B: int, device: torch.device) -> Int[Tensor, " B"]:
    """Draw a seed for each request and round from the request's generator, or the device's, as vLLM does.

    Ranks of a tensor-parallel group hold equal generators, so they draw equal seeds and emit equal tokens.
    """
    seeds = torch.empty(B, dtype=torch.int64, device=device).random_()
    for b, generator in sampling.generators.items():
        if b < B:
            seeds[b : b + 1].random_(generator=generator)
    return seeds


def _samplings(sampling: Any, B: int, V: int) -> list[SamplingParams]:
    """Return each request's temperature, top-k and top-p; bias, penalties and min-p are in the logits already."""
    if sampling.all_greedy:
        return [_params(0.0, None, 1.0)] * B
    columns: list[Sequence[Any]] = [
        sampling.temperature[:B].tolist(),
        [V] * B if sampling.top_k is None else sampling.top_k[:B].tolist(),
        [1.0] * B if sampling.top_p is None else sampling.top_p[:B].tolist(),
    ]
    return [_params(t, k if 0 < k < V else None, p) for t, k, p in zip(*columns, strict=True)]


@lru_cache(maxsize=4096)
def _params(temperature: float, top_k: int | None, top_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
