"""Generate text for prompts by speculative decoding, with exactly the target's distribution."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from threading import RLock
from typing import Any, Final, overload

import torch

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.drafters.interface import Drafter, check_sampling, fork
from draftproof.engine.batch import Batch, Encoder
from draftproof.engine.beam_search import check_beams
from draftproof.engine.draft_length import draft_length_policy
from draftproof.engine.request import Allowed, Chunk, Output, Request, Session, TextSession, budgets_of, refused_session
from draftproof.engine.round import Emitted, Parts, parts
from draftproof.engine.stop import TextStream, cut
from draftproof.models.interface import Model
from draftproof.models.tokenizer import Detokenizer, OnePrompt, Prompt, Tokenizer, each, encode
from draftproof.rules import Verifier

FIELDS: Final = tuple(f.name for f in fields(SamplingParams))
"""Keywords of `generate` and `stream` that are fields of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine: rows that advance together, and tokens of a text, prompt included."""

    max_batch: int = 8
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.max_batch), ("max_length", self.max_length)):
            unlimited = name == "max_length" and value is None
            if not unlimited and not (is_whole(value) and int(value or 0) >= 1):
                raise ValueError(f"{name} must be a whole number ≥ 1; got {value!r}")


def _always() -> bool:
    return True


class Engine:
    """Lossless speculative decoding with one target and one drafter.

    `draftproof.load` makes one. `drafter=None` is plain decoding: the rule does not matter then, every token is drawn
    with the random numbers of its position, and a run with rule="coupled" and the same seeds gives the same text.

    One engine may be used by several threads and by several streams at once: calls take turns, streams after every
    round, and each running stream has a drafter memory of its own. A seeded request gives the same text again in the
    same engine and the same batch. With `rule="coupled"`, without a drafter, or with a drafter that copies, the text
    does not depend on the other rows of its batch either. A head or draft model may round q differently beside other
    rows: the distribution stays exact, and a seeded text may then differ from the one alone.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        drafter: Drafter | None,
        *,
        rule: str | Verifier = "block",
        num_draft_tokens: int | str = "auto",
        eos: Collection[int] = (),
        limits: Limits | None = None,
        hf: Any = None,
    ) -> None:
        self.name = "draftproof"
        self.model, self.tokenizer, self.drafter, self.rule = model, tokenizer, drafter, rule
        self.eos, self.limits, self.hf = frozenset(eos), limits or Limits(), hf
        self.num_draft_tokens = num_draft_tokens
        self._parts = parts(model, drafter, rule)
        self._lock, self._is_lent, self._spare = RLock(), False, list[Drafter]()
        draft_length_policy(num_draft_tokens)  # refuse a wrong value here, not at the first prompt

    def __repr__(self) -> str:
        target = type(self.hf).__name__ if self.hf is not None else type(self.model).__name__
        words = {"target": target, **self.description, "device": str(self.model.device)}
        return f"Engine({', '.join(f'{name}: {value}' for name, value in words.items())})"

    @property
    def default_sampling(self) -> SamplingParams:
        """Return the sampling of a request that asks for none: the model's own settings, else temperature 0.7."""
        settings = getattr(self.hf, "generation_config", None)
        if not getattr(settings, "do_sample", False):
            return SamplingParams(temperature=0.7)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(settings, name, None) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value})

    @overload
    def generate(
        self,
        prompts: OnePrompt,
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        max_tokens: int | Sequence[int] = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: bool = ...,
        allowed: Allowed | None = ...,
        chat: bool | None = ...,
        num_beams: int = ...,
        length_penalty: float = ...,
        go_on: Callable[[], bool] = ...,
        **sampling_fields: Any,
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Sequence[OnePrompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        max_tokens: int | Sequence[int] = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: bool = ...,
        allowed: Allowed | None = ...,
        chat: bool | None = ...,
        num_beams: int = ...,
        length_penalty: float = ...,
        go_on: Callable[[], bool] = ...,
        **sampling_fields: Any,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | Sequence[int] = 256,
        stop: str | Sequence[str] | None = None,
        logprobs: bool = False,
        allowed: Allowed | None = None,
        chat: bool | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        go_on: Callable[[], bool] = _always,
        **sampling_fields: Any,
    ) -> Output | list[Output]:
        """Continue one prompt, or a list of prompts as one batch.

        prompts           a string, token ids, chat messages, or a list of those
        sampling          one `SamplingParams` for all, or one for each; or its fields as keywords, temperature=0.7, on
                          top of `default_sampling`
        max_tokens, stop  budgets (one, or one for each prompt) and strings that end a text
        logprobs          also return each token's log-probability under the distribution it was drawn from (at
                          temperature 0 a point mass: all 0)
        allowed           a grammar: allowed(output tokens) returns the mask of tokens that may follow
        chat              whether a string is a user's turn (default: if the tokenizer has a chat template)
        num_beams         more than 1 runs transformers' own beam search, which samples nothing and is not drafted for
        go_on             called after every round; False ends all texts where they are, with finish_reason "cancelled"

        One prompt gives an `Output`, a list gives a list. A request that fails does not stop the others: its output
        has finish_reason "error". A single prompt that fails raises.
        """
        items, is_one = each(prompts)
        samplings = self._samplings(sampling, sampling_fields, len(items))
        budgets = budgets_of(max_tokens, len(items))
        stops = self._stops(stop)
        if num_beams != 1:
            ignored = {"sampling": sampling, **sampling_fields, "stop": stop, "allowed": allowed}
            ignored |= {"logprobs": logprobs or None, "go_on": None if go_on is _always else go_on}
            check_beams(num_beams, ignored)
            return self._beams(items, is_one, budgets, chat, num_beams, length_penalty)
        texts = []
        for index, (item, params, budget) in enumerate(zip(items, samplings, budgets, strict=True)):
            try:
                texts.append(self._start(self._request(item, params, budget, stops, allowed, logprobs, chat)))
            except (ValueError, TypeError) as error:
                if is_one:
                    raise
                texts.append(refused_session(index, error, params))
        with self._lock, self._borrowed() as borrowed:
            self._run(texts, borrowed, go_on)
        outputs = [text.output() for text in texts]
        if is_one and outputs[0].finish_reason == "error":
            raise RuntimeError(outputs[0].error)
        return outputs[0] if is_one else outputs

    def _beams(
        self, items: list[Any], is_one: bool, budgets: list[int], chat: bool | None, beams: int, length_penalty: float
    ) -> Output | list[Output]:
        from draftproof.engine.beam_search import beam_search

        with self._lock:
            outputs = [
                beam_search(self.hf, self.tokenizer, self._tokens(item, chat), budget, beams, length_penalty)
                for item, budget in zip(items, budgets, strict=True)
            ]
        return outputs[0] if is_one else outputs

    @contextmanager
    def _borrowed(self) -> Iterator[Parts]:
        """Lend the parts of a round for as long as some requests run: a drafter whose memory nobody else changes."""
        with self._lock:
            forked = None
            if self._is_lent:
                forked = self._spare.pop() if self._spare else fork(self._parts.drafter)
            self._is_lent = True
        try:
            yield self._parts if forked is None else replace(self._parts, drafter=forked)
        finally:
            with self._lock:
                if forked is None:
                    self._is_lent = False
                else:
                    self._spare.append(forked)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Output]:
        """Continue token ids, each with a seed of its own, until max_tokens or the end of the text.

        This is the method that an audit requires of a decoder. A request that fails raises: a text cut short would be
        taken for one that ended.
        """
        rows = [list(prompt) for prompt in prompts]
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        if len(rows) != len(samplings):
            raise ValueError(f"seeds must have one entry a prompt: {len(rows)} prompts, {len(samplings)} seeds")
        outputs = self.generate(rows, samplings, max_tokens=max_tokens) if rows else []
        failed = next((output for output in outputs if output.finish_reason == "error"), None)
        if failed is not None:
            raise RuntimeError(failed.error)
        return outputs

    @property
    def description(self) -> dict[str, str]:
        """Describe rule, drafter and draft length in words, for an audit's certificate."""
        rule = self.rule if isinstance(self.rule, str) else getattr(self.rule, "__name__", type(self.rule).__name__)
        drafter = "none" if self.drafter is None else type(self.drafter).__name__
        return {"rule": rule, "drafter": drafter, "draft length": str(self.num_draft_tokens)}

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        allowed: Allowed | None = None,
        chat: bool | None = None,
        **sampling_fields: Any,
    ) -> Iterator[Chunk]:
        """Continue one prompt and yield what every round adds. Closing the iterator cancels between rounds."""
        items, _ = each(prompt) if not isinstance(prompt, str) else ([prompt], True)
        if len(items) != 1:
            raise ValueError(f"stream takes one prompt; got {len(items)}: use generate for a list")
        [params] = self._samplings(sampling, sampling_fields, 1)
        [budget] = budgets_of(max_tokens, 1)
        request = self._request(items[0], params, budget, self._stops(stop), allowed, False, chat)
        return self._stream(self._start(request))

    def _stream(self, text: TextSession) -> Iterator[Chunk]:
        with self._borrowed() as borrowed:
            session, batch = text.session, self._batch([text], borrowed)
            while session.finish_reason is None:
                tokens, characters = len(session.tokens), len(text.text)
                with self._lock:
                    self._step(batch, {session.id: text})
                if session.finish_reason == "error":
                    raise RuntimeError(session.error)
                piece, new = text.text[characters:], session.tokens[tokens:]
                stats = session.stats.snapshot()
                yield Chunk(piece, new, session.finish_reason, stats, session.exact, session.deviation)

    def _run(self, texts: list[TextSession], borrowed: Parts, go_on: Callable[[], bool]) -> None:
        batch = self._batch(texts, borrowed)
        by_id = {text.session.id: text for text in texts}
        while batch.rows or batch.waiting:
            self._step(batch, by_id)
            if not go_on():
                break
        for text in texts:
            text.session.finish_reason = text.session.finish_reason or "cancelled"

    def _batch(self, texts: list[TextSession], borrowed: Parts) -> Batch:
        batch = Batch(borrowed, draft_length_policy(self.num_draft_tokens), self.limits.max_batch, self._max_length)
        batch.waiting.extend(text.session for text in texts if text.session.finish_reason is None)
        return batch

    def _step(self, batch: Batch, by_id: Mapping[int, TextSession]) -> None:
        """Run one round, extend the texts, and remove finished rows."""
        with torch.inference_mode():
            for session, emitted in batch.step():
                self._extend(by_id[session.id], emitted)
        batch.leave({s.id for s in batch.rows if s.finish_reason is not None})

    def _extend(self, text: TextSession, emitted: Emitted) -> None:
        """Append what a round emitted, up to the end of the text."""
        session = text.session
        limit = self._max_length
        room = session.room if limit is None else min(session.room, limit - len(session.tokens))
        kept, piece, session.finish_reason = cut(emitted.tokens, room, self.eos, text.stream)
        session.tokens += kept
        session.stats.emitted += len(kept)
        session.logprobs += emitted.logprobs[: len(kept)]
        text.text += piece
        if emitted.deviation is not None:
            session.exact, session.deviation = False, max(session.deviation or 0.0, emitted.deviation)
        if emitted.fault is not None and session.finish_reason is None:
            session.finish_reason, session.error = "error", f"request {session.id}: {emitted.fault}"

    def _start(self, request: Request) -> TextSession:
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(Detokenizer(self.tokenizer, after=request.prompt), request.stop)
        session = Session.start(request)
        if request.max_tokens == 0:
            session.finish_reason = "length"
        return TextSession(session, stream)

    def _stops(self, stop: Any) -> tuple[str, ...]:
        """Return the stop strings as a tuple, or refuse what is not one string or several."""
        stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
        stops = () if stop is None else stops
        wrong = [s for s in stops if not isinstance(s, str)]
        if wrong:
            raise TypeError(f"stop must be a string or a list of strings; got {wrong[0]!r}")
        if stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= to load()")
        return stops

    def _request(
        self,
        prompt: Any,
        sampling: SamplingParams,
        max_tokens: int,
        stops: tuple[str, ...],
        allowed: Allowed | None,
        logprobs: bool,
        chat: bool | None,
    ) -> Request:
        """Make a request, or refuse it with the reason."""
        tokens, source, V = self._tokens(prompt, chat), None, self.model.vocab_size
        if isinstance(self.model, Encoder):
            source, tokens = tuple(tokens), [self.model.start]
        limit = self._max_length
        if limit is not None and len(tokens) >= limit:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the model has room for fewer than {limit}")
        outside = next((token for token in sampling.logit_bias if token >= V), None)
        if outside is not None:
            raise ValueError(f"logit_bias names token {outside}; the vocabulary is [0, {V})")
        check_sampling(self.drafter, sampling)
        seeded = sampling.seed is not None
        if not seeded:
            sampling = replace(sampling, seed=int(torch.randint(2**62, ())))
        return Request(tuple(tokens), sampling, max_tokens, stops, source, allowed, logprobs, seeded)

    def _tokens(self, prompt: Any, chat: bool | None) -> list[int]:
        if self.tokenizer is None and (isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping))):
            raise ValueError("this engine has no tokenizer: pass token ids, or tokenizer= to load()")
        tokens = list(prompt) if self.tokenizer is None else encode(prompt, self.tokenizer, chat=chat)
        if not tokens:
            start = getattr(self.tokenizer, "bos_token_id", None)
            if start is None:
                raise ValueError("the prompt is empty, and the tokenizer has no token to begin a text with")
            tokens = [int(start)]
        V = self.model.vocab_size
        outside = next((token for token in tokens if not 0 <= token < V), None)
        if outside is not None:
            raise ValueError(f"prompt token {outside} is outside the vocabulary [0, {V})")
        return tokens

    def _samplings(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, sampling_fields: dict[str, Any], n: int
    ) -> list[SamplingParams]:
        """Return one `SamplingParams` for each of n prompts."""
        unknown = sorted(set(sampling_fields) - set(FIELDS))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; sampling takes {', '.join(FIELDS)}")
        if sampling_fields and sampling is not None:
            raise ValueError(f"give sampling or its fields ({', '.join(sampling_fields)}), not both")
        if sampling is None:
            sampling = replace(self.default_sampling, **sampling_fields)
        if isinstance(sampling, SamplingParams):
            return [sampling] * n
        if isinstance(sampling, Mapping) or not isinstance(sampling, Sequence):
            raise TypeError(
                f"sampling must be a SamplingParams, or one for each prompt; got a {type(sampling).__name__}: pass "
                "SamplingParams(temperature=0.7), or its fields as keywords"
            )
        wrong = next((each for each in sampling if not isinstance(each, SamplingParams)), None)
        if wrong is not None:
            raise TypeError(f"sampling must hold a SamplingParams for each prompt; got {wrong!r} in it")
        if len(sampling) != n:
            raise ValueError(f"sampling must be one, or one for each of {n} prompts; got {len(sampling)}")
        return list(sampling)

    @property
    def _max_length(self) -> int | None:
        """Return the smaller of the model's and the caller's limit on tokens; None if there is neither."""
        limits = [n for n in (self.model.max_length, self.limits.max_length) if n is not None]
        return min(limits) if limits else None
