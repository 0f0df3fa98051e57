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
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft, Verdict
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.request import Output
from draftproof.models.tokenizer import encode
from draftproof.rules.block import block
from draftproof.train.config import Budget, Plan
from draftproof.train.generate import Texts
from draftproof.train.loss import CHUNK
from draftproof.train.target import Lesson, TargetSignals
from draftproof.train.trainer import Student

MOST_TEXTS: Final = 256
BATCH: Final = 8


@dataclass(frozen=True, slots=True)
class Exam:
    """Shares of positions, at each step: the mass that target and head have in common, and equal first choices."""

    texts: int
    positions: int
    mass_kept: float
    accepted: list[float]
    first_choice: list[float]


@torch.no_grad()
def examine(student: Student, teacher: TargetSignals, texts: Texts, seconds: float) -> Exam:
    """On at most MOST_TEXTS texts, and for so many seconds."""
    depth, batch = student.course.depth, min(BATCH, student.course.batch)
    sums = torch.zeros(2, depth, dtype=torch.float64)
    mass, positions, seen, began = 0.0, 0, 0, time.monotonic()
    for first in range(0, min(len(texts), MOST_TEXTS), batch):
        if first and (time.monotonic() - began) * (1 + batch / first) > seconds:
            break
        part = texts.of(torch.arange(first, min(first + batch, len(texts))))
        seen += len(part)
        lesson = teacher.lesson(part, depth)
        positions += len(lesson.at)
        mass += float(_dist(lesson).sum())
        for step, out in enumerate(student.outs(lesson, depth, student.average)):
            sums[:, step] += _compared(out, student.rows, lesson)
    shares = (sums / max(1, positions)).tolist()
    return Exam(seen, positions, mass / max(1, positions), shares[0], shares[1])


def _compared(out: Float[Tensor, "M H"], rows: Float[Tensor, "R H"], lesson: Lesson) -> Float[Tensor, "2"]:
    """Sums over positions: of the common mass, and of equal first choices."""
    sums = torch.zeros(2, dtype=torch.float64)
    for part in torch.arange(len(out)).split(CHUNK):
        q = (out[part].to(rows.dtype) @ rows.T).float().softmax(-1)
        sums[0] += float(torch.minimum(q, _dist(lesson, part)).sum())
        sums[1] += float((q.argmax(-1) == lesson.best[part]).sum())
    return sums


def _dist(lesson: Lesson, part: Int[Tensor, " m"] | slice = slice(None)) -> Float[Tensor, "m R"]:
    return (lesson.scores[part].float() - lesson.lse[part, None]).exp()


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
        [SamplingParams(**sampling, seed=seed + n) for n in range(len(asked))],
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


DRAFTED: Final = 4
"""Tokens of a draft: what others are measured with."""

GPU_BATCH: Final = 64
CPU_BATCH: Final = 8


def tried(
    plan: Plan, device: torch.device, budget: Budget, stage: Callable[[str, float], None]
) -> tuple[dict[str, dict[str, float]], int]:
    """Tokens for each pass with drafts of DRAFTED tokens, by sampling and kind, as far as the time goes; and over how
    many texts. In float32, as on a CPU."""
    rows = GPU_BATCH if device.type == "cuda" else CPU_BATCH
    how: dict[str, Any] = {"device": plan.device, "num_draft_tokens": DRAFTED, "max_batch": rows, "rule": _by_reference}
    engine = load(plan.target, f"head:{plan.out}", dtype=torch.float32, **how)
    prompts, found, texts = held_out(plan.prompts), dict[str, dict[str, float]](), 0
    for done, (name, sampling) in enumerate(SAMPLINGS.items()):
        stage("evaluation", done / len(SAMPLINGS))
        left = budget.left_until(budget.seconds) / (len(SAMPLINGS) - done)
        made = tallies(engine, prompts, sampling, max_tokens=128, seed=plan.seed, seconds=0.9 * left)
        found[name] = {kind: tally.per_pass for kind, tally in made.items()}
        texts = max(texts, made["all"].texts)
    return found, texts


def _by_reference(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """The default rule, but not by its name: its kernels would be compiled for longer than the evaluation may take."""
    return block(p, draft, rng)
