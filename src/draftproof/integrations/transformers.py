"""Run speculative decoding inside transformers' generate, with its processors, stopping criteria and streamers:

    model.generate(**inputs, custom_generate=draftproof.transformers.generate, drafter="ngram", rule="block")

The output has the distribution of plain `model.generate(**inputs)`; with do_sample=False it is the same text.
"""

import inspect
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, GenerationMode

from draftproof.core.sampling import SamplingParams
from draftproof.core.types import InexactError
from draftproof.drafters.interface import check_sampling
from draftproof.drafters.registry import default_branches, is_name
from draftproof.engine.draft_length import check_length
from draftproof.engine.limits import Limits
from draftproof.engine.load import as_drafter
from draftproof.engine.request import Encoder, Request, Session
from draftproof.engine.round import Emitted, parts
from draftproof.engine.scheduler import Scheduler, scheduler_for
from draftproof.integrations.transformers_rows import ProcessedDistributions, TokenMatrix, apply_criteria
from draftproof.models.fingerprint import PerModel
from draftproof.models.interface import Model
from draftproof.models.loading import LoadOptions, as_model, load_model

STATEFUL: Final = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model itself and keeps a cache of every call",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps the contexts of all its calls",
    "WhisperNoSpeechDetection": "it keeps the probability of its first call",
    "DiaEOSDelayPatternLogitsProcessor": "it keeps which rows are about to end",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs two rows of scores for each row",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs two rows of scores for each row",
}
"""Processors whose result is not a function of a row's tokens and scores. Speculation calls processors for draft tokens
that are rejected later, and for the same position again. Custom processors are not checked: they are called for every
scored position with all rows of the batch (transformers_rows.py), and must depend on `input_ids` and `scores` only."""

HANDLED_INPUTS: Final = (
    *("attention_mask", "position_ids", "cache_position", "past_key_values"),
    *("encoder_outputs", "use_cache", "logits_to_keep"),
)
"""Model inputs prepared by generate that this loop replaces by its own cache and positions."""

LOADING: Final = LoadOptions(pack=False)
"""How a draft model is loaded by name."""

_DRAFT_MODELS: PerModel[Any] = PerModel()
"""The last draft model loaded by name for each target that is alive."""


def generate(
    model: Any,
    input_ids: Int[Tensor, "R T"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Any = "ngram",
    rule: Any = "block",
    num_draft_tokens: int | str = "auto",
    branches: int | None = None,
    seed: int | None = None,
    streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Run the decoding loop for `custom_generate`. Pass these options to generate; the rest comes from transformers:

    drafter, rule, num_draft_tokens, branches   as `draftproof.load` takes them
    seed                                        None: seeds are drawn from torch's generator, so that
                                                `torch.manual_seed` reproduces the text

    For stop strings pass a `StopStringCriteria` in stopping_criteria: transformers does not pass on the tokenizer.
    A row that has ended is padded while the others continue. Preparing a model (copying its modules, reading a head,
    loading a draft model) is done in the first call, and again after the model has changed.
    """
    _refuse(logits_processor, generation_config, model_kwargs)
    served = as_model(model)
    branches = default_branches(drafter, rule) if branches is None else branches
    confidence = "auto" if num_draft_tokens == "auto" else 0.0
    built = as_drafter(_loaded(drafter, model), served, LOADING, branches=branches, confidence=confidence, hf=model)
    inputs = GenerateInputs(
        input_ids, inputs_tensor, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    )
    matrix = _token_matrix(inputs, served, generation_config, seed)
    _check_lengths(matrix, served, generation_config, stopping_criteria)
    sampling = SamplingParams(temperature=1 if generation_config.do_sample else 0)
    check_sampling(built, sampling)
    targets = ProcessedDistributions(matrix, logits_processor, sampling)
    its_parts = parts(served, built, rule, targets)
    check_length(num_draft_tokens)
    limits = Limits(max_batch=len(matrix.sessions))
    scheduler = scheduler_for(lambda: its_parts, limits, num_draft_tokens, served.max_length)
    scheduler.submit(matrix.sessions)
    _run(scheduler, matrix, stopping_criteria, ColumnStreamer(matrix, streamer or _callers_streamer()))
    if not generation_config.return_dict_in_generate:
        return matrix.padded()
    kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(sequences=matrix.padded())


def _loaded(drafter: Any, model: Any) -> Any:
    """Return the model that a name or folder stands for, loaded once for each target; return anything else unchanged.

    Drafters themselves are made for each call: their memory of a text is dropped with them, and a text does not depend
    on earlier calls. What is slow to make (copies of modules, heads, draft models) is kept as long as its model.
    """
    if not isinstance(drafter, str | Path) or is_name(str(drafter)):
        return drafter
    return _DRAFT_MODELS.get(model, "drafter", str(drafter), lambda: load_model(drafter, LOADING)[0])


def _run(scheduler: Scheduler, matrix: TokenMatrix, criteria: StoppingCriteriaList, columns: "ColumnStreamer") -> None:
    """Run rounds until every row has ended."""
    while not scheduler.idle:
        rounds = {matrix.row_of(session): emitted for session, emitted in scheduler.step()}
        if not rounds:
            continue  # prompts were read
        before = {row: len(matrix.sessions[row].tokens) for row in rounds}
        for row, emitted in rounds.items():
            matrix.sessions[row].tokens += emitted.tokens
        apply_criteria(matrix, before, criteria)
        for row, emitted in rounds.items():
            _check_fault(row, matrix.sessions[row], emitted)
        scheduler.remove([s for s in scheduler.running if s.finish_reason is not None])
        columns.show()
    columns.end()


def _check_fault(row: int, session: Session, emitted: Emitted) -> None:
    if emitted.fault is not None and session.finish_reason is None:
        if emitted.cause is not None:
            raise emitted.cause
        raise RuntimeError(f"row {row}: {emitted.fault}")


@dataclass(slots=True)
class ColumnStreamer:
    """Streams as transformers does: one column of tokens at a time, as soon as all running rows have it."""

    matrix: TokenMatrix
    streamer: Any
    shown: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = len(self.matrix.row(0))

    def show(self) -> None:
        if self.streamer is None:
            return
        running = [r for r, session in enumerate(self.matrix.sessions) if session.finish_reason is None]
        tokens = self.matrix.padded().cpu()
        stop = min((len(self.matrix.row(r)) for r in running), default=tokens.shape[1])
        for column in range(self.shown, stop):
            self.streamer.put(tokens[:, column])
        self.shown = stop

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


def _callers_streamer() -> Any:
    """Return the streamer that was passed to generate, from generate's own stack frame.

    transformers (5.17 to 5.22 at least) passes a custom function only those arguments that its own loops do not have.
    That leaves `streamer` out: it would never be fed or closed, and its reader would block forever.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE:
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


def _refuse(processors: LogitsProcessorList, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse options that would change the distribution, and requested outputs that this loop does not make."""
    for processor in processors:
        reason = STATEFUL.get(type(processor).__name__)
        if reason is not None:
            raise InexactError(f"{type(processor).__name__} cannot process drafts exactly: {reason}")
    mode = config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not supported with drafts: leave custom_generate out")
    wanted = [name for name in ("scores", "logits", "attentions", "hidden_states") if getattr(config, f"output_{name}")]
    if wanted:
        raise ValueError(f"output_{wanted[0]}=True is not collected by this loop: leave it out, or custom_generate")
    unknown = [name for name, value in model_kwargs.items() if name not in HANDLED_INPUTS and value is not None]
    if unknown:
        raise ValueError(f"{unknown[0]} is not understood by this loop, which takes token ids and their mask")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError("past_key_values holds tokens already: pass the whole text instead")


@dataclass(frozen=True, slots=True)
class GenerateInputs:
    """The inputs prepared by generate: prompts padded on the left, and for an encoder-decoder the `source` tokens."""

    input_ids: Int[Tensor, "R T"]
    source: Tensor | None
    mask: Tensor | None
    positions: Tensor | None

    def starts(self) -> list[int]:
        """Return the index of each prompt's first token, after its padding."""
        R, T = self.input_ids.shape
        if self.mask is None:
            return [0] * R
        real = self.mask.bool()
        starts = T - real.sum(1)
        if not torch.equal(real, torch.arange(T, device=real.device) >= starts[:, None]) or bool((starts == T).any()):
            raise ValueError("attention_mask must be 0 on the left of a prompt and 1 on all of it: pad on the left")
        wanted = torch.arange(T, device=real.device) - starts[:, None]
        if self.positions is not None and not torch.equal(self.positions.expand_as(real)[real], wanted[real]):
            raise ValueError("position_ids must count each prompt's tokens from 0: leave them out")
        return list(starts.tolist())

    def sources(self) -> list[tuple[int, ...]]:
        """Return each row's source without its padding, repeated if several rows are generated per source."""
        source = self.source
        if source is None or source.ndim != 2 or source.is_floating_point():
            raise ValueError("the encoder needs token ids here: pass input_ids")
        source = source.repeat_interleave(len(self.input_ids) // len(source), 0)
        real = torch.ones_like(source) if self.mask is None else self.mask
        return [tuple(row[mask].tolist()) for row, mask in zip(source, real.bool(), strict=True)]


def _token_matrix(inputs: GenerateInputs, served: Model, config: GenerationConfig, seed: int | None) -> TokenMatrix:
    """Start a session for every row, with its own seed."""
    encodes, R = isinstance(served, Encoder), len(inputs.input_ids)
    starts = [0] * R if encodes else inputs.starts()
    sources = inputs.sources() if encodes else [None] * R
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (R,), generator=generator).tolist()
    sampling, room = _draft_sampling(config), config.max_length - inputs.input_ids.shape[1]
    rows = inputs.input_ids.tolist()
    requests = [
        Request(tuple(row[start:]), replace(sampling, seed=number), room, source=source, seeded=True)
        for row, start, source, number in zip(rows, starts, sources, seeds, strict=True)
    ]
    padding = [row[:start] for row, start in zip(rows, starts, strict=True)]
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return TokenMatrix([Session.start(request) for request in requests], padding, pad, inputs.input_ids.device)


def _draft_sampling(config: GenerationConfig) -> SamplingParams:
    """Return sampling parameters for the drafter, similar to the processors. Any choice is exact; closer is faster."""
    if not config.do_sample:
        return SamplingParams(temperature=0, repetition_penalty=config.repetition_penalty or 1.0)
    return SamplingParams(
        temperature=config.temperature or 1.0,
        top_k=config.top_k or None,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )


def _check_lengths(
    matrix: TokenMatrix, served: Model, config: GenerationConfig, criteria: StoppingCriteriaList
) -> None:
    """Refuse texts longer than the model's positions, and rows of different lengths without a token to pad them."""
    furthest = max(session.prompt_length + session.room for session in matrix.sessions)
    if served.max_length is not None and furthest > served.max_length:
        raise ValueError(
            f"max_length={config.max_length} lets a text grow to {furthest} tokens, and the model has positions for "
            f"{served.max_length}: set max_new_tokens"
        )
    lengths_differ = len(matrix.sessions) > 1 and any(not isinstance(c, MaxLengthCriteria) for c in criteria)
    if lengths_differ and config._pad_token_tensor is None:
        raise ValueError("rows may end at different lengths, and there is no token to pad them with: set pad_token_id")
