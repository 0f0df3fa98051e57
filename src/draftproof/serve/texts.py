"""Follow the texts that one HTTP request asks for: their chunks as they come, their counters and their times."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from draftproof.engine.request import Chunk, Stats, TokenLogprobs
from draftproof.engine.service import RequestStream, ServiceClosedError
from draftproof.serve.errors import ApiError
from draftproof.serve.state import State


@dataclass(slots=True)
class Text:
    """One text that is being generated.

    index           its place among the choices of the answer
    prompt_index    which of the request's prompts it continues
    arrived         when the HTTP request came, by `time.perf_counter`
    is_constrained  whether a grammar or `min_tokens` limits its tokens, which may leave none
    """

    index: int
    prompt_index: int
    stream: RequestStream
    arrived: float
    is_constrained: bool = False
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    first: float | None = None
    """When the first token came."""
    last: float | None = None
    """When the last token came."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.stream.prompt)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return self.stream.prompt_logprobs

    async def chunks(self, state: State) -> AsyncGenerator[Chunk, None]:
        """Yield what every round adds, and count it."""
        try:
            async for chunk in self.stream:
                if chunk.finish_reason == "cancelled":
                    raise ServiceClosedError("the request was cancelled, because the server stops")
                self._take(chunk, state)
                yield chunk
        except ServiceClosedError as error:
            raise ApiError(503, str(error), code="engine_stopped") from error
        except Exception as error:
            raise self._failure(error, state) from error
        self.finish_reason = self.finish_reason or "length"  # a text of no tokens has no chunks
        seconds = time.perf_counter() - self.arrived
        state.metrics.record_end(self.finish_reason, self.prompt_tokens, self.stats, seconds)

    def _take(self, chunk: Chunk, state: State) -> None:
        if chunk.tokens:
            is_first = self.first is None
            seconds = chunk.made - (self.arrived if is_first else self.last or chunk.made)
            state.metrics.record_round(self.stats, chunk.stats, seconds, is_first)
            self.first = chunk.made if is_first else self.first
            self.last = chunk.made
        self.stats = chunk.stats
        self.tokens += chunk.tokens
        self.text += chunk.text
        self.logprobs += chunk.logprobs or []
        self.finish_reason = chunk.finish_reason

    def _failure(self, error: Exception, state: State) -> ApiError:
        """Return what the client is told of a text that failed."""
        state.metrics.record_end("error", self.prompt_tokens, self.stats, time.perf_counter() - self.arrived)
        if not state.service.is_alive:
            return ApiError(503, f"the engine has stopped: {error}", code="engine_stopped")
        status = 400 if self.is_constrained else 500  # with a grammar, that nothing may follow is the request's doing
        return ApiError(status, str(error), code="generation_failed")


def cancel_all(texts: Sequence[Text]) -> None:
    """End texts between two rounds; those that have ended stay as they are."""
    for text in texts:
        text.stream.cancel()


async def chunks_of_all(texts: Sequence[Text], state: State) -> AsyncGenerator[tuple[Text, Chunk], None]:
    """Yield the chunks of several texts as they come; raise as soon as one of them fails, or after the time limit."""
    queue: asyncio.Queue[tuple[Text, Chunk] | Exception | None] = asyncio.Queue()

    async def follow(text: Text) -> None:
        try:
            async with aclosing(text.chunks(state)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((text, chunk))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(text)) for text in texts]
    limit = state.settings.request_timeout
    deadline = None if limit is None else asyncio.get_running_loop().time() + limit - _age(texts)
    remaining = len(tasks)
    try:
        while remaining:
            async with asyncio.timeout_at(deadline):  # not around `yield`: it would cancel what the caller does there
                entry = await queue.get()
            if entry is None:
                remaining -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    except TimeoutError:
        message = f"the request took longer than {limit:g} s, the limit of this server"
        raise ApiError(503, message, code="timeout") from None
    finally:
        cancel_all(texts)
        for task in tasks:
            task.cancel()


def _age(texts: Sequence[Text]) -> float:
    """Return the seconds since the request came, which its prompt took to be read."""
    return time.perf_counter() - min(text.arrived for text in texts)


# ------------------------------------------------------------------------------------------------- what answers report


def usage(texts: Sequence[Text]) -> dict[str, Any]:
    """Return OpenAI's usage. A prompt that has several texts is counted once."""
    firsts = {text.prompt_index: text for text in reversed(texts)}.values()
    prompt, completion = sum(text.prompt_tokens for text in firsts), sum(len(text.tokens) for text in texts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(text.stats.cached_tokens for text in firsts)},
    }


def reports(texts: Sequence[Text]) -> dict[str, Any]:
    """Return the extra fields of an answer: `metrics` and, as llama.cpp names them, `timings`."""
    return {"metrics": _metrics(texts), "timings": _timings(texts)}


def _metrics(texts: Sequence[Text]) -> dict[str, Any]:
    """Return times and acceptance of a request; of several texts, the first token, the last one, and sums."""
    arrived = min(text.arrived for text in texts)
    first, last = _span(texts)
    queued = min(text.stats.queue_seconds for text in texts)
    tokens = sum(len(text.tokens) for text in texts)
    gaps = [
        (text.last - text.first) / (len(text.tokens) - 1)
        for text in texts
        if text.first is not None and text.last is not None and len(text.tokens) > 1
    ]
    working = None if last is None else last - arrived - queued
    return {
        "time_to_first_token_ms": _ms(None if first is None else first - arrived),
        "generation_time_ms": _ms(None if first is None or last is None else last - first),
        "queue_time_ms": _ms(queued),
        "mean_itl_ms": _ms(sum(gaps) / len(gaps) if gaps else None),
        "tokens_per_second": tokens / working if working else None,
        "speculative_decoding": _speculation([text.stats for text in texts]),
    }


def _speculation(all_stats: Sequence[Stats]) -> dict[str, Any] | None:
    """Return how drafts were accepted; None if nothing was drafted."""
    rounds = [each for stats in all_stats for each in stats.record if each.drafted > 0]
    if not rounds:
        return None
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    histogram = [0] * (1 + max(r.accepted for r in rounds))
    for each in rounds:
        histogram[each.accepted] += 1
    return {
        "mean_acceptance_length": 1 + accepted / len(rounds),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(r.drafted for r in rounds),
    }


def _timings(texts: Sequence[Text]) -> dict[str, Any]:
    first, last = _span(texts)
    admitted = min(text.arrived + text.stats.queue_seconds for text in texts)
    cached = sum(text.stats.cached_tokens for text in texts)
    return {
        "cache_n": cached,
        "prompt_n": sum(text.prompt_tokens for text in texts) - cached,
        "prompt_ms": _ms(None if first is None else first - admitted),
        "predicted_n": sum(len(text.tokens) for text in texts),
        "predicted_ms": _ms(None if first is None or last is None else last - first),
        "draft_n": sum(text.stats.drafted for text in texts),
        "draft_n_accepted": sum(text.stats.accepted for text in texts),
    }


def _span(texts: Sequence[Text]) -> tuple[float | None, float | None]:
    """Return when the first and the last token of all texts came; None if there was none."""
    firsts = [text.first for text in texts if text.first is not None]
    lasts = [text.last for text in texts if text.last is not None]
    return (min(firsts), max(lasts)) if firsts and lasts else (None, None)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
