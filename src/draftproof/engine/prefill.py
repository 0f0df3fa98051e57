"""Read prompts (chunked prefill): choose the chunks that a round reads, read them, and record what was read.

A prompt begins with the longest prefix that another row holds, which is taken over instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.drafters.interface import TargetOutputs
from draftproof.drafters.pooling import DrafterState
from draftproof.engine.prefix_cache import Found, PrefixCache
from draftproof.engine.request import Session, TokenLogprobs
from draftproof.engine.round import Clock, Emitted, Parts
from draftproof.models.rows import Read, Reading, Rows

CHUNKS_ALONE: int = 8
"""Chunks of prompts that are read in one pass while no row decodes: larger passes are hardly faster on a CPU. More are
not read beside rows that are streamed either."""

PREFILL_PER_ROW: int = 4
"""Tokens of prompts read in a round for each row that decodes: a round then takes about three times as long at most."""

PREFILL_UNWATCHED: int = 16
"""Tokens of prompts read in a round for each row of a full batch, while no text is streamed."""

PromptChunk = tuple[Session, Reading]
"""A row, and the tokens of its prompt that are read next."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Reads the prompts of an engine's rows.

    max_batch           rows in the pool at once, those whose prompts are being read included
    max_prefill_tokens  tokens of prompts read beside decoding rows in one round, in whole chunks; None: see `Limits`
    """

    rows: Rows
    prefixes: PrefixCache
    max_batch: int
    max_prefill_tokens: int | None = None

    # ---------------------------------------------------------------------------------------------- what is read

    def chunks(self, reading: Sequence[Session], running: Sequence[Session], parts: Parts) -> list[PromptChunk]:
        """Choose the chunks of prompts that are read in this round, oldest request first.

        Chunks end at fixed positions, so that a chunk's keys and values depend on its tokens alone. The first is always
        read, others if there is time: a token takes longer the more there are before it.

        reading  rows whose prompts are not read completely
        running  rows that decode
        """
        if self.rows.chunk is None:
            return []
        chunks: list[PromptChunk] = []
        budget: float = self._budget(self.rows.chunk, reading, running)
        for session in reading:
            if budget <= 0:
                break
            if session.read == 0:
                found = self.prefixes.longest(session, [*running, *reading], self.rows)
                if self._gains_by_waiting(session, found, chunks):
                    break
                if found is not None:
                    self._reuse(session, found, parts)
            at, stop = session.read, len(session.request.prompt) - 1
            while at < stop and budget > 0:
                end = min(stop, self.rows.chunk_around(at)[1])
                cost = self.rows.reading_cost(at, end)
                if chunks and cost > 2 * budget:  # less than half of it is within the budget
                    return chunks
                chunks.append(_chunk(session, at, end))
                budget -= cost
                at = end
        return chunks

    def whole_prompts(self, reading: Sequence[Session]) -> list[PromptChunk]:
        """Return the prompts of rows that cannot read them in chunks."""
        return [_chunk(session, 0, len(session.request.prompt) - 1) for session in reading]

    def _budget(self, size: int, reading: Sequence[Session], running: Sequence[Session]) -> int:
        """Return how many tokens of prompts are read in this round.

        Where nobody watches the tokens come, the order of work does not matter, and large passes save overhead. Where
        somebody does, a round has a token for each row that decodes and a chunk for each whose prompt is being read: a
        long prompt does not hold up the others, and many requests that come together soon decode together.
        """
        if self.max_prefill_tokens is not None:
            return max(size, self.max_prefill_tokens)
        if all(session.listener is None for session in running):
            return max(CHUNKS_ALONE * size, PREFILL_UNWATCHED * self.max_batch)
        return max(size * min(CHUNKS_ALONE, len(reading)), PREFILL_PER_ROW * len(running))

    def _gains_by_waiting(self, session: Session, found: Found | None, chunks: Sequence[PromptChunk]) -> bool:
        """Return whether chunks that are read in this round hold more of a prompt than any row does now."""
        most = self.prefixes.most_shared(session, [other for other, _ in chunks], self.rows)
        return most > (0 if found is None else found.length)

    def _reuse(self, session: Session, found: Found, parts: Parts) -> None:
        """Take over a prefix of the prompt that another row holds, when the first chunk is to be read."""
        assert self.rows.pool is not None
        if session.request.drafter and not DrafterState(parts.drafter).adopt(session, found.holder, found.length):
            return
        self.rows.pool.share(found.holder, session.id, found.length)
        self.prefixes.touch(found.holder)
        session.read = session.stats.cached_tokens = found.length
        session.whole_chunks = min(found.length, found.whole_chunks)

    # --------------------------------------------------------------------------------------- reading and recording

    def run(self, chunks: Sequence[PromptChunk], parts: Parts, clock: Clock) -> list[Read]:
        """Read chunks in a pass of their own."""
        with clock("prefill"):
            return self.rows.score([], layers=parts.features.layers, reading=[chunk for _, chunk in chunks]).read

    def record(
        self, chunks: Sequence[PromptChunk], read: Sequence[Read], parts: Parts, seconds: float
    ) -> list[tuple[Session, Emitted]]:
        """Record what was read in so many seconds; return the requests whose prompts the drafter failed to read."""
        failed: dict[int, tuple[Session, Emitted]] = {}
        state, total = DrafterState(parts.drafter), max(1, sum(len(chunk.tokens) for _, chunk in chunks))
        for (session, chunk), states in zip(chunks, read, strict=True):
            self._record_chunk(session, chunk, states)
            try:
                if session.request.drafter and session.id not in failed and state.follow(session, session.read):
                    session.target_outputs = None
            except Exception as error:  # a caller's drafter may raise anything; the request ends alone
                fault = f"its drafter failed: {type(error).__name__}: {error}"
                failed[session.id] = session, Emitted([], fault=fault, cause=error)
            session.stats.seconds["prefill"] += seconds * len(chunk.tokens) / total
        return list(failed.values())

    def _record_chunk(self, session: Session, chunk: Reading, states: Read) -> None:
        start, stop = session.read, session.read + len(chunk.tokens)
        if start == session.whole_chunks and self.rows.chunk_around(start) == (start, stop):
            session.whole_chunks = stop
        session.read = stop
        if states.hidden and session.request.drafter:
            session.target_outputs = _joined(session.target_outputs, stop, states.hidden)
        if states.logits is not None and chunk.scored:
            session.prompt_logprobs += _prompt_logprobs(session, start, states.logits)


def _chunk(session: Session, start: int, stop: int) -> PromptChunk:
    """Return a prompt's tokens from `start` to `stop`, scored if their log-probabilities are asked for."""
    request = session.request
    return session, Reading(session.id, request.prompt[start:stop], request.prompt_logprobs is not None)


def _joined(before: TargetOutputs | None, stop: int, hidden: tuple[Tensor, ...]) -> TargetOutputs:
    """Return the target's states at a prompt's tokens up to `stop`: those of earlier chunks, then these."""
    if before is None:
        return TargetOutputs(stop, None, hidden)
    pairs = zip(before.hidden, hidden, strict=True)
    return TargetOutputs(stop, None, tuple(torch.cat(pair) for pair in pairs))


def _prompt_logprobs(session: Session, first: int, logits: Float[Tensor, "n V"]) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt's tokens that follow those just read, from the logits after these."""
    more = session.request.prompt_logprobs or 0
    followers = session.request.prompt[first + 1 : first + 1 + len(logits)]
    raw = logits.double().log_softmax(-1)
    own = raw.gather(1, torch.tensor(followers, device=raw.device)[:, None])[:, 0].tolist()
    best = raw.topk(more) if more else None
    top = (
        [[] for _ in followers]
        if best is None
        else [
            list(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    )
    return [TokenLogprobs(token, value, None, row) for token, value, row in zip(followers, own, top, strict=True)]
