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
"""Tokens of an answer below which it says nothing of the loop."""


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
    """By kind, and over all; in so many seconds, for which texts are left out or cut short. Prompts that the target has
    no room for are left out too."""
    prompts = [prompt for prompt in prompts if _fits(engine, prompt)]
    ends, each_token = time.monotonic() + seconds, 0.0
    found: dict[str, Tally] = {OVERALL: Tally()}
    rows = engine.limits.max_batch
    if seconds < math.inf:  # a few tokens tell how long many will take
        _, each_token = _said(engine, prompts[:rows], sampling, FEWEST, seed)
    for first in range(0, len(prompts), rows):
        affordable = (ends - time.monotonic()) / each_token if each_token else math.inf
        if affordable < FEWEST and found[OVERALL].texts:
            break
        some = prompts[first : first + rows]
        outputs, took = _said(engine, some, sampling, int(max(FEWEST, min(max_tokens, affordable))), seed + first)
        each_token = max(each_token, took)
        for prompt, output in zip(some, outputs, strict=True):
            found.setdefault(prompt.kind, Tally()).note(output)
            found[OVERALL].note(output)
    return found


def _fits(engine: Engine, prompt: Prompt) -> bool:
    assert engine.tokenizer is not None
    room = engine.model.max_length
    return room is None or len(encode(prompt.text, engine.tokenizer)) + FEWEST <= room


def _said(
    engine: Engine, prompts: Sequence[Prompt], sampling: Mapping[str, Any], max_tokens: int, seed: int
) -> tuple[list[Output], float]:
    """Answers, and the seconds that a token of all of them took, the prompts counted in."""
    began = time.monotonic()
    samplings = [Sampling(**sampling, seed=seed + i) for i in range(len(prompts))]
    outputs = engine.generate([prompt.text for prompt in prompts], samplings, max_tokens=max_tokens)
    assert isinstance(outputs, list)
    failed = next((output.error for output in outputs if output.finish_reason == "error"), None)
    if failed is not None:
        raise RuntimeError(failed)
    longest = max([1, *(output.stats.emitted for output in outputs)])
    return outputs, (time.monotonic() - began) / longest
