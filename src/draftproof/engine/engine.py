"""The engine as its users see it: prompts in, texts out, with exactly the target's distribution."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from draftproof.core.sampling import SamplingParams
from draftproof.drafters.interface import Drafter, features_of
from draftproof.engine.batch import Batch, Encoder
from draftproof.engine.draft_length import AutoLength, DraftLengthPolicy, FixedLength
from draftproof.engine.request import Allowed, Chunk, Emission, Output, Request, Session
from draftproof.engine.round import Emitted, NoDrafter, Parts, TargetDistributions
from draftproof.engine.stop import cut
from draftproof.models.interface import Model
from draftproof.models.tokenizer import Detokenizer, Prompt, TextStream, Tokenizer, each, encode
from draftproof.rules import RULES, Verifier, resolve

FIELDS: Final = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an engine takes on."""

    max_batch: int = 8
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be ≥ 1; got {self.max_batch}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be None or ≥ 1; got {self.max_length}")


class Engine:
    """Lossless speculative decoding with one target and one drafter.

    Made by `draftproof.load`. `drafter=None` is plain decoding: the rule does not matter then, every token is drawn
    with the noise of its position, and a run with rule="coupled" and the same seeds gives the same text.
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
        draft_length_policy(num_draft_tokens)  # a wrong value should not wait for the first prompt

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
        go_on: Callable[[], bool] = lambda: True,
        **sampling_fields: Any,
    ) -> Output | list[Output]:
        """Continue one prompt, or a list of them together.

        prompts           a string, token ids, chat messages, or a list of those
        sampling          one `SamplingParams` for all, or one for each; or its fields as keywords, temperature=0.7
        max_tokens, stop  budgets (one, or one for each prompt) and strings that end a text
        logprobs          also return each token's log-probability under the distribution it was drawn from
        allowed           a grammar: allowed(output tokens) gives the mask of tokens that may follow
        chat              whether a string is a user's turn (default: if the tokenizer has a chat template)
        num_beams         more than 1 hands over to transformers' own beam search
        go_on             asked after every round; if it says no, texts stay as they are, with finish_reason "cancelled"

        One prompt gives an `Output`, a list gives a list. A request that fails does not stop the others: its output
        has finish_reason "error"; a prompt on its own raises.
        """
        items, is_one = each(prompts)
        samplings = self._samplings(sampling, sampling_fields, len(items))
        budgets = _budgets(max_tokens, len(items))
        if num_beams > 1:
            from draftproof.engine.beam_search import beam_search

            tokens = [self._tokens(item, chat) for item in items]
            beams = [
                beam_search(self.hf, self.tokenizer, t, n, num_beams, length_penalty)
                for t, n in zip(tokens, budgets, strict=True)
            ]
            return beams[0] if is_one else beams
        requests = [
            self._request(self._tokens(item, chat), s, n, stop, allowed, logprobs)
            for item, s, n in zip(items, samplings, budgets, strict=True)
        ]
        outputs = [emission.output() for emission in self._run(requests, go_on)]
        if is_one and outputs[0].finish_reason == "error":
            raise RuntimeError(outputs[0].error)
        return outputs[0] if is_one else outputs

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Output]:
        """Continue token ids, each with a seed of its own, until max_tokens or the end of the text: what an audit asks
        of a decoder. A request that fails raises: a text that is cut short would be taken for one that ended."""
        rows = [list(prompt) for prompt in prompts]
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        if len(rows) != len(samplings):
            raise ValueError(f"seeds must have one entry a prompt: {len(rows)} prompts, {len(samplings)} seeds")
        outputs = self.generate(rows, samplings, max_tokens=max_tokens) if rows else []
        assert isinstance(outputs, list)
        failed = next((output for output in outputs if output.finish_reason == "error"), None)
        if failed is not None:
            raise RuntimeError(failed.error)
        return outputs

    @property
    def description(self) -> dict[str, str]:
        """What it is made of, in words: for an audit's certificate."""
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
        """Continue one prompt and give what every round adds. Closing the iterator cancels between rounds."""
        items, _ = each(prompt) if not isinstance(prompt, str) else ([prompt], True)
        if len(items) != 1:
            raise ValueError(f"stream takes one prompt; got {len(items)}: use generate for a list")
        [s] = self._samplings(sampling, sampling_fields, 1)
        emission = self._emission(self._request(self._tokens(items[0], chat), s, max_tokens, stop, allowed, False))
        batch = self._batch([emission])
        while emission.session.finish_reason is None:
            before = len(emission.session.tokens), len(emission.text)
            self._step(batch, {emission.session.id: emission})
            session = emission.session
            if session.finish_reason == "error":
                raise RuntimeError(session.error)
            yield Chunk(emission.text[before[1] :], session.tokens[before[0] :], session.finish_reason, session.stats)

    def _run(self, requests: list[Request], go_on: Callable[[], bool]) -> list[Emission]:
        emissions = [self._emission(request) for request in requests]
        batch = self._batch(emissions)
        under_way = {e.session.id: e for e in emissions}
        while batch.rows or batch.waiting:
            self._step(batch, under_way)
            if not go_on():
                break
        for emission in emissions:
            emission.session.finish_reason = emission.session.finish_reason or "cancelled"
        return emissions

    def _batch(self, emissions: list[Emission]) -> Batch:
        batch = Batch(self._parts, draft_length_policy(self.num_draft_tokens), self.limits.max_batch, self._longest)
        batch.waiting.extend(e.session for e in emissions if e.session.finish_reason is None)
        return batch

    def _step(self, batch: Batch, under_way: Mapping[int, Emission]) -> None:
        with torch.inference_mode():
            for session, emitted in batch.step():
                self._extend(under_way[session.id], emitted)
        batch.leave({s.id for s in batch.rows if s.finish_reason is not None})

    def _extend(self, emission: Emission, emitted: Emitted) -> None:
        session = emission.session
        kept, text, session.finish_reason = cut(session, emitted.tokens, self.eos, emission.stream, self._longest)
        session.tokens += kept
        session.stats.emitted += len(kept)
        session.logprobs += emitted.logprobs[: len(kept)]
        emission.text += text
        if emitted.fault is not None and session.finish_reason is None:
            session.finish_reason, session.error = "error", f"request {session.id}: {emitted.fault}"

    def _emission(self, request: Request) -> Emission:
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(Detokenizer(self.tokenizer, after=request.prompt), request.stop)
        session = Session.start(request)
        if request.max_tokens == 0:
            session.finish_reason = "length"
        return Emission(session, stream)

    def _request(
        self,
        tokens: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        stop: str | Sequence[str] | None,
        allowed: Allowed | None,
        logprobs: bool,
    ) -> Request:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= to load()")
        source = None
        if isinstance(self.model, Encoder):
            source, tokens = tuple(tokens), [self.model.start]
        if self._longest is not None and len(tokens) >= self._longest:
            raise ValueError(f"the prompt has {len(tokens)} tokens; the model has room for fewer than {self._longest}")
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
        if not 0 <= min(tokens) <= max(tokens) < V:
            raise ValueError(f"prompt token {max(tokens)} is outside the vocabulary [0, {V})")
        return tokens

    def _samplings(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, given: dict[str, Any], n: int
    ) -> list[SamplingParams]:
        unknown = sorted(set(given) - set(FIELDS))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; sampling takes {', '.join(FIELDS)}")
        if given and sampling is not None:
            raise ValueError(f"give sampling or its fields ({', '.join(given)}), not both")
        if sampling is None:
            sampling = SamplingParams(**given)
        if isinstance(sampling, SamplingParams):
            return [sampling] * n
        if len(sampling) != n:
            raise ValueError(f"sampling must be one, or one for each of {n} prompts; got {len(sampling)}")
        return list(sampling)

    @property
    def _longest(self) -> int | None:
        limits = [n for n in (self.model.max_length, self.limits.max_length) if n is not None]
        return min(limits) if limits else None


def parts(
    model: Model, drafter: Drafter | None, rule: str | Verifier, targets: TargetDistributions | None = None
) -> Parts:
    """Put together what rounds are made of. No drafter is plain decoding, whatever the rule."""
    coupled = resolve(rule) is RULES["coupled"]
    if drafter is None:
        return Parts(model, NoDrafter(), "coupled", features_of(NoDrafter()), shared=False, targets=targets)
    return Parts(model, drafter, rule, features_of(drafter), shared=coupled, targets=targets)


def draft_length_policy(num_draft_tokens: int | str) -> DraftLengthPolicy:
    """A fixed draft length, or "auto"."""
    if num_draft_tokens == "auto":
        return AutoLength()
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
        raise ValueError(f'num_draft_tokens must be "auto" or a whole number ≥ 0; got {num_draft_tokens!r}')
    return FixedLength(num_draft_tokens)


def _budgets(max_tokens: int | Sequence[int], n: int) -> list[int]:
    budgets = [max_tokens] * n if isinstance(max_tokens, int) else list(max_tokens)
    if len(budgets) != n or any(b < 0 for b in budgets):
        raise ValueError(f"max_tokens must be ≥ 0, one for all or one for each of {n} prompts; got {max_tokens!r}")
    return budgets
