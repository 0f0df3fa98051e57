"""What a head is worth: tokens for each pass of the target, in the engine's own loop, by kind of prompt."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from draftproof.core.sampling import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.request import Output
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

    def note(self, output: Output) -> None:
        self.texts += 1
        self.tokens += output.stats.emitted
        self.passes += output.stats.rounds

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
    asked = [prompt for prompt in prompts if _fits(engine, prompt)]
    outputs = engine.generate(
        [prompt.text for prompt in asked],
        [Sampling(**sampling, seed=seed + n) for n in range(len(asked))],
        max_tokens=max_tokens,
        go_on=lambda: time.monotonic() < ends,
    )
    assert isinstance(outputs, list)
    found: dict[str, Tally] = {OVERALL: Tally()}
    for prompt, output in zip(asked, outputs, strict=True):
        if output.finish_reason == "error":
            raise RuntimeError(output.error)
        if output.stats.rounds:
            found.setdefault(prompt.kind, Tally()).note(output)
            found[OVERALL].note(output)
    return found


def _fits(engine: Engine, prompt: Prompt) -> bool:
    assert engine.tokenizer is not None
    room = engine.model.max_length
    return room is None or len(encode(prompt.text, engine.tokenizer)) + FEWEST <= room
