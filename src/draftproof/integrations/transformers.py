"""Inside transformers' own generate, with its processors, stopping criteria and streamers:

    model.generate(**inputs, custom_generate=draftproof.transformers.generate, drafter="ngram", rule="block")

The text has the distribution that `model.generate(**inputs)` draws from; with do_sample=False it is the same text.
"""

import inspect
import sys
from dataclasses import dataclass, field, replace
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
from draftproof.drafters.registry import default_branches
from draftproof.engine.batch import Batch, Encoder
from draftproof.engine.engine import draft_length_policy, parts
from draftproof.engine.load import as_drafter, as_model
from draftproof.engine.request import Request, Session
from draftproof.engine.round import Emitted
from draftproof.integrations.transformers_rows import Processed, Sheet, cut
from draftproof.models.interface import Model

STATEFUL: Final = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model itself and keeps a cache of every call",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps the contexts of all its calls",
    "WhisperNoSpeechDetection": "it keeps the probability that its first call saw",
    "DiaEOSDelayPatternLogitsProcessor": "it keeps which rows are about to end",
    "ClassifierFreeGuidanceLogitsProcessor": "it wants two rows of scores for each row",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it wants two rows of scores for each row",
}
"""Processors whose answer is no function of a row's tokens and scores: speculation asks about texts that are never
said, and asks again. Your own are not looked into: they are called for every scored position, drafted tokens included,
with all rows side by side (sheet.py), and must answer from `input_ids` and `scores` alone."""

UNDERSTOOD: Final = (
    *("attention_mask", "position_ids", "cache_position", "past_key_values"),
    *("encoder_outputs", "use_cache", "logits_to_keep"),
)
"""What generate prepares for a model: these are taken over by our own cache and positions."""


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
    """The decoding loop for `custom_generate`. These are for you, the rest comes from transformers:

    drafter, rule, num_draft_tokens, branches   as `draftproof.load` takes them
    seed                                        None: seeds are drawn from torch's generator, so that
                                                `torch.manual_seed` gives the same text again

    Stop strings: pass a `StopStringCriteria` in stopping_criteria, as transformers does not hand the tokenizer on.
    A row that has ended is padded while the others go on.
    """
    _refuse(logits_processor, generation_config, model_kwargs)
    served = as_model(model)
    branches = default_branches(drafter, rule) if branches is None else branches
    made = as_drafter(drafter, served, None, branches, (None, None, False), model)
    given = Given(input_ids, inputs_tensor, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    sheet = _sheet(given, served, generation_config, seed)
    _check_ends(sheet, served, generation_config, stopping_criteria)
    dists = Processed(sheet, logits_processor, SamplingParams(temperature=1 if generation_config.do_sample else 0))
    batch = Batch(
        parts(served, made, rule, dists), draft_length_policy(num_draft_tokens), len(sheet.sessions), served.max_length
    )
    batch.waiting.extend(sheet.sessions)
    _run(batch, sheet, stopping_criteria, Columns(sheet, streamer or _callers_streamer()))
    if not generation_config.return_dict_in_generate:
        return sheet.matrix()
    kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(sequences=sheet.matrix())


def _run(batch: Batch, sheet: Sheet, criteria: StoppingCriteriaList, columns: "Columns") -> None:
    while batch.rows or batch.waiting:
        rounds = {sheet.row(session): emitted for session, emitted in batch.step()}
        before = {row: len(sheet.sessions[row].tokens) for row in rounds}
        for row, emitted in rounds.items():
            sheet.sessions[row].tokens += emitted.tokens
        cut(sheet, before, criteria)
        for row, emitted in rounds.items():
            _check_fault(row, sheet.sessions[row], emitted)
        batch.leave({s.id for s in batch.rows if s.finish_reason is not None})
        columns.show()
    columns.end()


def _check_fault(row: int, session: Session, emitted: Emitted) -> None:
    if emitted.fault and session.finish_reason is None:
        raise RuntimeError(
            f"row {row}: the scores behind token {len(session.tokens)} are no distribution: NaN, infinity, or nothing that the "
            "processors allow"
        )


@dataclass(slots=True)
class Columns:
    """Streams as transformers does, one token of every row at a time: rows wait for the slowest."""

    sheet: Sheet
    streamer: Any
    shown: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = len(self.sheet.text(0))

    def show(self) -> None:
        if self.streamer is None:
            return
        going = [r for r, session in enumerate(self.sheet.sessions) if session.finish_reason is None]
        matrix = self.sheet.matrix().cpu()
        stop = min((len(self.sheet.text(r)) for r in going), default=matrix.shape[1])
        for column in range(self.shown, stop):
            self.streamer.put(matrix[:, column])
        self.shown = stop

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


_GENERATE: Final = inspect.unwrap(GenerationMixin.generate).__code__


def _callers_streamer() -> Any:
    """The streamer that was given to generate. transformers (5.17 to 5.22 at least) hands a function only those
    arguments that its own loops do not have, which leaves `streamer` out: it would be opened, never fed and never
    closed, and whoever reads from it would wait for ever. So it is taken from generate's own frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE:
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


def _refuse(processors: LogitsProcessorList, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise where the distribution would be another one, or where something asked for would be left out."""
    for processor in processors:
        why = STATEFUL.get(type(processor).__name__)
        if why is not None:
            raise InexactError(f"{type(processor).__name__} cannot be asked about drafts: {why}")
    mode = config.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value!r} is not drafted for: leave custom_generate out")
    wanted = [name for name in ("scores", "logits", "attentions", "hidden_states") if getattr(config, f"output_{name}")]
    if wanted:
        raise ValueError(f"output_{wanted[0]}=True is not kept by this loop: leave it out, or custom_generate")
    unknown = [name for name, value in model_kwargs.items() if name not in UNDERSTOOD and value is not None]
    if unknown:
        raise ValueError(f"{unknown[0]} is not understood by this loop, which takes token ids and their mask")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError("past_key_values holds tokens already: pass the whole text instead")


@dataclass(frozen=True, slots=True)
class Given:
    """What generate prepared: prompts side by side, padded on the left; for an encoder, `source` beside them."""

    input_ids: Int[Tensor, "R T"]
    source: Tensor | None
    mask: Tensor | None
    positions: Tensor | None

    def starts(self) -> list[int]:
        """Where each prompt begins, behind its padding."""
        R, T = self.input_ids.shape
        if self.mask is None:
            return [0] * R
        real = self.mask.bool()
        starts = T - real.sum(1)
        if not torch.equal(real, torch.arange(T, device=real.device) >= starts[:, None]) or bool((starts == T).any()):
            raise ValueError("attention_mask must be 0 on the left of a prompt and 1 on all of it: pad on the left")
        counted = torch.arange(T, device=real.device) - starts[:, None]
        if self.positions is not None and not torch.equal(self.positions.expand_as(real)[real], counted[real]):
            raise ValueError("position_ids must count each prompt's tokens from 0: leave them out")
        return list(starts.tolist())

    def sources(self) -> list[tuple[int, ...]]:
        """Each row's source, without its padding; of several rows for one source each has its own."""
        source = self.source
        if source is None or source.ndim != 2 or source.is_floating_point():
            raise ValueError("an encoder is given token ids here: pass input_ids")
        source = source.repeat_interleave(len(self.input_ids) // len(source), 0)
        real = torch.ones_like(source) if self.mask is None else self.mask
        return [tuple(row[there].tolist()) for row, there in zip(source, real.bool(), strict=True)]


def _sheet(given: Given, served: Model, config: GenerationConfig, seed: int | None) -> Sheet:
    encodes, R = isinstance(served, Encoder), len(given.input_ids)
    starts = [0] * R if encodes else given.starts()
    sources = given.sources() if encodes else [None] * R
    numbers = None if seed is None else torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (R,), generator=numbers).tolist()
    sampling, room = _sampling(config), config.max_length - given.input_ids.shape[1]
    rows = given.input_ids.tolist()
    requests = [
        Request(tuple(row[start:]), replace(sampling, seed=number), room, source=source, seeded=True)
        for row, start, source, number in zip(rows, starts, sources, seeds, strict=True)
    ]
    padding = [row[:start] for row, start in zip(rows, starts, strict=True)]
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return Sheet([Session.start(request) for request in requests], padding, pad, given.input_ids.device)


def _sampling(config: GenerationConfig) -> SamplingParams:
    """How a drafter that draws should draw. Only a guess at the processors, and any guess is exact."""
    if not config.do_sample:
        return SamplingParams(temperature=0, repetition_penalty=config.repetition_penalty or 1.0)
    return SamplingParams(
        temperature=config.temperature or 1.0,
        top_k=config.top_k or None,
        top_p=config.top_p or 1.0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )


def _check_ends(sheet: Sheet, served: Model, config: GenerationConfig, criteria: StoppingCriteriaList) -> None:
    """Is there a position for every token that may come, and something to put behind a row that ends early?"""
    furthest = max(session.prompt_length + session.room for session in sheet.sessions)
    if served.max_length is not None and furthest > served.max_length:
        raise ValueError(
            f"max_length={config.max_length} lets a text grow to {furthest} tokens, and the model has positions for "
            f"{served.max_length}: set max_new_tokens"
        )
    lengths_differ = len(sheet.sessions) > 1 and any(not isinstance(c, MaxLengthCriteria) for c in criteria)
    if lengths_differ and config._pad_token_tensor is None:
        raise ValueError("rows may end at different lengths, and there is no token to pad them with: set pad_token_id")
