"""What a head is worth: tokens for each pass of the target, in the engine's own loop, by kind of prompt."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch

from draftproof.core.sampling import Sampling
from draftproof.engine.batch import Batch
from draftproof.engine.engine import Engine, pace, parts
from draftproof.engine.request import Request, Session
from draftproof.engine.stop import cut
from draftproof.models.text import encode

SAMPLINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=0": {"temperature": 0.0},
}
OVERALL: Final = "all"
FEWEST: Final = 8
"""Tokens of an answer that there must be room for: fewer say nothing of the loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    text: str


@dataclass(slots=True)
class Tally:
    """Tokens said, in so many passes of the target."""

    texts: int = 0
    tokens: int = 0
    passes: int = 0

    def note(self, session: Session) -> None:
        self.texts += 1
        self.tokens += session.stats.emitted
        self.passes += session.stats.rounds

    @property
    def per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def held_out(path: Path | None = None) -> list[Prompt]:
    """Prompts that no training has seen, kinds taking turns: whatever is left out at the end is left out of all."""
    source = path or files("draftproof.train") / "held_out.jsonl"
    read = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    kinds: dict[str, list[Prompt]] = {}
    for row in read:
        kinds.setdefault(row["kind"], []).append(Prompt(row["kind"], row["prompt"]))
    most = max(len(prompts) for prompts in kinds.values())
    return [prompts[i] for i in range(most) for prompts in kinds.values() if i < len(prompts)]


def tallies(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    *,
    max_tokens: int = 128,
    seed: int = 0,
    seconds: float = math.inf,
) -> dict[str, Tally]:
    """By kind, and over all; in so many seconds, after which texts are left out or stay as short as they are. Prompts
    that the target has no room for are left out too."""
    ends = time.monotonic() + seconds
    asked = {}
    for n, prompt in enumerate(prompt for prompt in prompts if _fits(engine, prompt)):
        session = _session(engine, prompt, Sampling(**sampling, seed=seed + n), max_tokens)
        asked[session.id] = prompt, session
    _answer(engine, [session for _, session in asked.values()], lambda: time.monotonic() < ends)
    found: dict[str, Tally] = {OVERALL: Tally()}
    for prompt, session in asked.values():
        if session.stats.rounds:
            found.setdefault(prompt.kind, Tally()).note(session)
            found[OVERALL].note(session)
    return found


def _fits(engine: Engine, prompt: Prompt) -> bool:
    assert engine.tokenizer is not None
    room = engine.model.max_length
    return room is None or len(encode(prompt.text, engine.tokenizer)) + FEWEST <= room


def _session(engine: Engine, prompt: Prompt, sampling: Sampling, max_tokens: int) -> Session:
    assert engine.tokenizer is not None
    tokens = encode(prompt.text, engine.tokenizer)
    return Session.start(Request(tuple(tokens), sampling, max_tokens, seeded=True))


def _answer(engine: Engine, sessions: Sequence[Session], go_on: Callable[[], bool]) -> None:
    """The engine's rounds, with a look at the clock after each: `generate` would go on to the end of its texts."""
    longest = engine.model.max_length
    built = parts(engine.model, engine.drafter, engine.rule)
    batch = Batch(built, pace(engine.num_draft_tokens), engine.limits.max_batch, longest)
    batch.waiting.extend(sessions)
    with torch.inference_mode():
        while batch.rows or batch.waiting:
            for session, emitted in batch.step():
                if emitted.fault:
                    raise RuntimeError(f"the scores behind token {len(session.tokens)} of a text are no law")
                kept, _, session.finish_reason = cut(session, emitted.tokens, engine.eos, None, longest)
                session.tokens += kept
                session.stats.emitted += len(kept)
            if not go_on():
                return
            batch.leave({session.id for session in batch.rows if session.finish_reason is not None})
