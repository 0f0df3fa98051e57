"""Generate text for prompts by speculative decoding, with exactly the target's distribution."""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, overload

import torch

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.drafters.interface import Drafter, check_sampling
from draftproof.engine.beam_search import check_beams
from draftproof.engine.draft_length import check_length
from draftproof.engine.grammar import end_later
from draftproof.engine.limits import Limits
from draftproof.engine.loop import Loop
from draftproof.engine.request import (
    Allowed,
    Chunk,
    Encoder,
    Output,
    Request,
    Session,
    budgets_of,
    raise_error,
    refused_session,
)
from draftproof.engine.round import Emitted, parts
from draftproof.engine.scheduler import scheduler_for
from draftproof.engine.stop import TextStream, cut
from draftproof.models.interface import Model
from draftproof.models.tokenizer import Detokenizer, OnePrompt, Prompt, Tokenizer, each, encode
from draftproof.rules import Verifier, resolve

if TYPE_CHECKING:
    from draftproof.engine.service import Service

FIELDS: Final = tuple(f.name for f in fields(SamplingParams))
"""Keywords of `generate` and `stream` that are fields of `SamplingParams`."""


def _always() -> bool:
    return True


class Engine:
    """Lossless speculative decoding with one target and one drafter.

    `draftproof.load` makes one. `drafter=None` is plain decoding: the rule does not matter then, every token is drawn
    with the random numbers of its position, and a run with rule="coupled" and the same seeds gives the same text.

    One engine may be used by several threads and by several streams at once: their requests share every round. A
    request may choose its own rule, draft length, or no drafter; one that fails does not disturb the others. On a CPU,
    with a model that was loaded here, a seeded request gives bit for bit the same text alone and among others
    (docs/decisions.md says where that ends).
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
        self.eos, self.limits = frozenset(eos), limits or Limits()
        self.loaded = hf
        """The target as it was passed in or loaded; the bundled model on four-bit weights is a `Llama`."""
        self.num_draft_tokens = num_draft_tokens
        self._parts = parts(model, drafter, rule)
        self._made: Loop | None = None
        self._making = Lock()
        check_length(num_draft_tokens)

    def __repr__(self) -> str:
        target = type(self.model if self.loaded is None else self.loaded).__name__
        words = {"target": target, **self.description, "device": str(self.model.device)}
        return f"Engine({', '.join(f'{name}: {value}' for name, value in words.items())})"

    @property
    def hf(self) -> Any:
        """Return the target as a transformers model; None if it is a `Model` of another kind.

        The bundled model on four-bit weights is made one now, on the same weights: importing transformers takes 3 s.
        """
        convert = getattr(self.loaded, "as_transformers", None)
        return self.loaded if convert is None else convert()

    @property
    def default_sampling(self) -> SamplingParams:
        """Return the sampling of a request that asks for none: the model's own settings, else temperature 0.7."""
        settings = getattr(self.loaded, "generation_config", None)
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
        logprobs: bool | int = ...,
        prompt_logprobs: bool | int = ...,
        allowed: Allowed | None = ...,
        rule: str | Verifier | None = ...,
        drafter: bool = ...,
        num_draft_tokens: int | str | None = ...,
        chat: bool | None = ...,
        stop_token_ids: Collection[int] = ...,
        ignore_eos: bool = ...,
        min_tokens: int = ...,
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
        logprobs: bool | int = ...,
        prompt_logprobs: bool | int = ...,
        allowed: Allowed | None = ...,
        rule: str | Verifier | None = ...,
        drafter: bool = ...,
        num_draft_tokens: int | str | None = ...,
        chat: bool | None = ...,
        stop_token_ids: Collection[int] = ...,
        ignore_eos: bool = ...,
        min_tokens: int = ...,
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
        logprobs: bool | int = False,
        prompt_logprobs: bool | int = False,
        allowed: Allowed | None = None,
        rule: str | Verifier | None = None,
        drafter: bool = True,
        num_draft_tokens: int | str | None = None,
        chat: bool | None = None,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
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
        logprobs          also return each token's log-probabilities (`TokenLogprobs`): raw, and under the distribution
                          it was drawn from; a number asks for so many alternatives besides
        prompt_logprobs   likewise for the tokens of the prompt
        allowed           a grammar: allowed(output tokens) returns the mask of tokens that may follow
        rule              the verification rule of these requests; None: the engine's
        drafter           False: plain decoding for these requests
        num_draft_tokens  0, a number, or "auto" for these requests; None: the engine's
        chat              whether a string is a user's turn (default: if the tokenizer has a chat template)
        stop_token_ids    tokens that end the text, besides the model's own
        ignore_eos        do not end at the model's own end-of-text tokens
        min_tokens        tokens before which the text does not end: what would end it is not allowed there
        num_beams         more than 1 runs transformers' own beam search, which samples nothing and is not drafted for
        go_on             called after every round; False ends all texts where they are, with finish_reason "cancelled"

        One prompt gives an `Output`, a list gives a list. A request that fails does not stop the others: its output
        has finish_reason "error". A single prompt that fails raises, and so does what makes all of them fail.
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
        options = self._options(stops, allowed, logprobs, prompt_logprobs, rule, drafter, num_draft_tokens)
        options |= self._end_options(allowed, stop_token_ids, ignore_eos, min_tokens)
        sessions = []
        for index, (item, params, budget) in enumerate(zip(items, samplings, budgets, strict=True)):
            try:
                sessions.append(self._start(self._request(item, params, budget, chat, options)))
            except (ValueError, TypeError) as error:
                if is_one:
                    raise
                sessions.append(refused_session(index, error, params))
        self._run(sessions, go_on)
        causes = {repr(session.cause) for session in sessions}
        if is_one or (len(causes) == 1 and sessions and sessions[0].cause is not None):
            raise_error(sessions[0])  # one reason for all of them
        outputs = [session.result() for session in sessions]
        return outputs[0] if is_one else outputs

    def _run(self, sessions: list[Session], go_on: Callable[[], bool]) -> None:
        """Run rounds until these requests have ended, or the caller does not want to go on."""
        loop = self._loop
        loop.submit(sessions)

        def ended() -> bool:
            return all(session.finish_reason is not None for session in sessions)

        seen = 0
        try:
            while not ended():
                loop.next_round(ended)
                rounds = sum(session.stats.rounds for session in sessions)
                if rounds > seen and not ended() and not go_on():  # not after a pass that only read prompts
                    break
                seen = rounds
        finally:
            self._cancel([session for session in sessions if session.finish_reason is None])

    def _cancel(self, sessions: list[Session]) -> None:
        if sessions:
            self._loop.cancel(sessions)
            self._loop.run_until(lambda: all(session.finish_reason is not None for session in sessions))

    @property
    def _loop(self) -> Loop:
        """Return the rounds of this engine; the pools are allocated when the first request comes."""
        with self._making:
            if self._made is None:
                # Weak: pools are freed with their engine, and do not wait for the garbage collector.
                me = weakref.proxy(self)
                scheduler = scheduler_for(lambda: me._parts, self.limits, self.num_draft_tokens, self._max_length)
                self._made = Loop(scheduler, lambda session, emitted: me._extend(session, emitted))
            return self._made

    def _beams(
        self, items: list[Any], is_one: bool, budgets: list[int], chat: bool | None, beams: int, length_penalty: float
    ) -> Output | list[Output]:
        from draftproof.engine.beam_search import beam_search

        outputs = [
            beam_search(self.hf, self.tokenizer, self._tokens(item, chat), budget, beams, length_penalty)
            for item, budget in zip(items, budgets, strict=True)
        ]
        return outputs[0] if is_one else outputs

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
        logprobs: bool | int = False,
        allowed: Allowed | None = None,
        rule: str | Verifier | None = None,
        drafter: bool = True,
        num_draft_tokens: int | str | None = None,
        chat: bool | None = None,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        **sampling_fields: Any,
    ) -> Iterator[Chunk]:
        """Continue one prompt and yield what every round adds. Closing the iterator cancels between rounds.

        The arguments are those of `generate`.
        """
        session = self.prepare(
            prompt,
            sampling,
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            allowed=allowed,
            rule=rule,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            chat=chat,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            **sampling_fields,
        )
        return self._stream(session)

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        logprobs: bool | int = False,
        prompt_logprobs: bool | int = False,
        allowed: Allowed | None = None,
        rule: str | Verifier | None = None,
        drafter: bool = True,
        num_draft_tokens: int | str | None = None,
        chat: bool | None = None,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        **sampling_fields: Any,
    ) -> Session:
        """Check a request for one prompt and return its session, which does not run yet."""
        items, _ = each(prompt) if not isinstance(prompt, str) else ([prompt], True)
        if len(items) != 1:
            raise ValueError(f"stream takes one prompt; got {len(items)}: use generate for a list")
        [params] = self._samplings(sampling, sampling_fields, 1)
        [budget] = budgets_of(max_tokens, 1)
        options = self._options(self._stops(stop), allowed, logprobs, prompt_logprobs, rule, drafter, num_draft_tokens)
        options |= self._end_options(allowed, stop_token_ids, ignore_eos, min_tokens)
        return self._start(self._request(items[0], params, budget, chat, options))

    def service(self, *, max_waiting: int = 256) -> "Service":
        """Return a service: a thread that runs this engine for many callers, from threads and from asyncio."""
        from draftproof.engine.service import Service  # which holds an engine

        return Service(self, max_waiting=max_waiting)

    def _stream(self, session: Session) -> Iterator[Chunk]:
        chunks: deque[Chunk] = deque()
        session.listener = chunks.append
        has_ended = session.finish_reason is not None
        self._loop.submit([session])
        try:
            while not has_ended:  # until the last chunk is here: a thread that runs the round sets the reason before
                self._loop.run_until(lambda: bool(chunks))
                raise_error(session)
                while chunks:
                    chunk = chunks.popleft()
                    has_ended = chunk.finish_reason is not None
                    yield chunk
        finally:
            self._cancel([session] if session.finish_reason is None else [])

    def _extend(self, session: Session, emitted: Emitted) -> None:
        """Append what a round emitted, up to the end of the text."""
        limit = self._max_length
        room = session.room if limit is None else min(session.room, limit - len(session.tokens))
        kept, piece, reason = cut(emitted.tokens, room, session.request.ends, session.stream)
        session.tokens += kept
        session.stats.emitted += len(kept)
        session.logprobs += emitted.logprobs[: len(kept)]
        session.text += piece
        if emitted.deviation is not None:
            session.exact, session.deviation = False, max(session.deviation or 0.0, emitted.deviation)
        if emitted.fault is not None and reason is None:
            reason, session.cause = "error", emitted.cause
            session.error = f"request {session.id}: {emitted.fault}"
        session.finish_reason = reason  # last: other threads take the text as soon as there is a reason
        session.notify(kept)

    def _start(self, request: Request) -> Session:
        session = Session.start(request)
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, after=request.prompt)
            session.stream = TextStream(detokenizer, request.stop, min_tokens=request.min_tokens)
        if request.max_tokens == 0 and request.prompt_logprobs is None:
            session.finish_reason = "length"
        return session

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

    def _options(
        self,
        stops: tuple[str, ...],
        allowed: Allowed | None,
        logprobs: bool | int,
        prompt_logprobs: bool | int,
        rule: str | Verifier | None,
        drafter: bool,
        num_draft_tokens: int | str | None,
    ) -> dict[str, Any]:
        """Return the fields of a request that do not depend on its prompt, or refuse them."""
        if rule is not None:
            resolve(rule)
        if num_draft_tokens is not None:
            check_length(num_draft_tokens)
        if drafter not in (True, False):
            raise TypeError(f"drafter of a request must be True or False: the engine has the drafter; got {drafter!r}")
        return {
            "stop": stops,
            "allowed": allowed,
            "logprobs": _alternatives("logprobs", logprobs, self.model.vocab_size),
            "prompt_logprobs": _alternatives("prompt_logprobs", prompt_logprobs, self.model.vocab_size),
            "rule": rule,
            "drafter": drafter and self.drafter is not None,
            "num_draft_tokens": num_draft_tokens,
        }

    def _end_options(
        self, allowed: Allowed | None, stop_token_ids: Collection[int], ignore_eos: bool, min_tokens: int
    ) -> dict[str, Any]:
        """Return the fields of a request that say which tokens end its text, or refuse them."""
        V = self.model.vocab_size
        outside = next((token for token in stop_token_ids if not is_whole(token) or not 0 <= token < V), None)
        if outside is not None:
            raise ValueError(f"stop_token_ids must be token ids in [0, {V}); got {outside!r}")
        if not is_whole(min_tokens) or min_tokens < 0:
            raise ValueError(f"min_tokens must be a whole number ≥ 0; got {min_tokens!r}")
        ends = (frozenset() if ignore_eos else self.eos) | frozenset(stop_token_ids)
        if min_tokens > 0 and ends:
            allowed = end_later(allowed, ends, min_tokens, V)
        return {"ends": ends, "min_tokens": min_tokens, "allowed": allowed}

    def _request(
        self, prompt: Any, sampling: SamplingParams, max_tokens: int, chat: bool | None, options: dict[str, Any]
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
        return Request(tuple(tokens), sampling, max_tokens, source=source, seeded=seeded, **options)

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


def _alternatives(name: str, value: bool | int, V: int) -> int | None:
    """Return how many alternatives to return with log-probabilities; None if there are to be none."""
    if value is False or value is None:
        return None
    if value is True:
        return 0
    if not is_whole(value) or not 0 <= value <= V:
        raise ValueError(f"{name} must be True, False or a number of alternatives from 0 to {V}; got {value!r}")
    return int(value)
