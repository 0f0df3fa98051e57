"""Evaluate a head: its acceptance on held-out texts, and tokens per target pass in the engine's loop."""

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
from draftproof.train.config import Budget, TrainConfig
from draftproof.train.generate import Texts
from draftproof.train.loss import LOGITS_CHUNK
from draftproof.train.target import TargetSignals, TrainingBatch
from draftproof.train.trainer import HeadTrainer

MAX_HELD_OUT_TEXTS: Final = 256
"""Held-out texts that are evaluated at most: more would hardly change the means."""

HELD_OUT_BATCH: Final = 8
"""Held-out texts of a batch at most."""

SAMPLINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=0": {"temperature": 0.0},
}
"""The sampling parameters of the evaluation in the engine, by the name that figures.json has for them."""

OVERALL: Final = "all"
"""Key of the counts over all kinds of prompts."""

MIN_ANSWER_TOKENS: Final = 8
"""Tokens of an answer that the target must have room for; a shorter answer tells nothing about drafts."""

DRAFT_TOKENS: Final = 4
"""Tokens of a draft, as in the published measurements of other heads."""

GPU_BATCH: Final = 64
CPU_BATCH: Final = 8
"""Requests that the engine decodes at once."""


@dataclass(frozen=True, slots=True)
class HeldOutMetrics:
    """Means over the trained positions of held-out texts.

    mass_kept     the target's probability of the head's vocabulary
    accepted      for each step of a draft, the overlap Σ min(p, q)
    first_choice  for each step of a draft, how often target and head have the same likeliest token
    """

    texts: int
    positions: int
    mass_kept: float
    accepted: list[float]
    first_choice: list[float]


@torch.no_grad()
def evaluate_held_out(trainer: HeadTrainer, signals: TargetSignals, texts: Texts, seconds: float) -> HeldOutMetrics:
    """Evaluate the averaged head on at most MAX_HELD_OUT_TEXTS texts, for about this many seconds."""
    depth, size = trainer.schedule.depth, min(HELD_OUT_BATCH, trainer.schedule.batch)
    sums = torch.zeros(2, depth, dtype=torch.float64)
    mass, positions, evaluated, began = 0.0, 0, 0, time.monotonic()
    for first in range(0, min(len(texts), MAX_HELD_OUT_TEXTS), size):
        if first and (time.monotonic() - began) * (1 + size / first) > seconds:
            break
        part = texts.select(torch.arange(first, min(first + size, len(texts))))
        evaluated += len(part)
        batch = signals.batch(part, depth)
        positions += len(batch.at)
        mass += float(_target_probs(batch).sum())
        for step, out in enumerate(trainer.draft_outputs(batch, depth, trainer.average)):
            sums[:, step] += _agreement(out, trainer.rows, batch)
    means = (sums / max(1, positions)).tolist()
    return HeldOutMetrics(evaluated, positions, mass / max(1, positions), means[0], means[1])


def _agreement(out: Float[Tensor, "M H"], rows: Float[Tensor, "R H"], batch: TrainingBatch) -> Float[Tensor, "2"]:
    """Return sums over positions: of the overlap, and of equal likeliest tokens."""
    sums = torch.zeros(2, dtype=torch.float64)
    for part in torch.arange(len(out)).split(LOGITS_CHUNK):
        q = (out[part].to(rows.dtype) @ rows.T).float().softmax(-1)
        sums[0] += float(torch.minimum(q, _target_probs(batch, part)).sum())
        sums[1] += float((q.argmax(-1) == batch.best[part]).sum())
    return sums


def _target_probs(batch: TrainingBatch, part: Int[Tensor, " m"] | slice = slice(None)) -> Float[Tensor, "m R"]:
    return (batch.scores[part].float() - batch.lse[part, None]).exp()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the evaluation; results are grouped by `kind`."""

    kind: str
    text: str


@dataclass(slots=True)
class PassCounts:
    """Tokens generated and target passes needed, over some texts."""

    texts: int = 0
    tokens: int = 0
    passes: int = 0

    def add(self, output: Output) -> None:
        self.texts += 1
        self.tokens += output.stats.emitted
        self.passes += output.stats.rounds

    @property
    def per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def tokens_per_pass(
    config: TrainConfig, device: torch.device, budget: Budget, stage: Callable[[str, float], None]
) -> tuple[dict[str, dict[str, float]], int]:
    """Measure tokens per target pass by sampling and kind, while the budget lasts, and return the number of texts.

    Drafts have DRAFT_TOKENS tokens. Everything runs in float32, so that a GPU counts the same as a CPU.
    """
    max_batch = GPU_BATCH if device.type == "cuda" else CPU_BATCH
    options: dict[str, Any] = {"device": config.device, "num_draft_tokens": DRAFT_TOKENS, "max_batch": max_batch}
    engine = load(config.target, f"head:{config.out}", dtype=torch.float32, rule=_block_without_kernels, **options)
    prompts, found, texts = held_out_prompts(config.prompts), dict[str, dict[str, float]](), 0
    for done, (name, sampling) in enumerate(SAMPLINGS.items()):
        stage("evaluation", done / len(SAMPLINGS))
        left = budget.left_until(budget.seconds) / (len(SAMPLINGS) - done)
        counts = count_passes(engine, prompts, sampling, max_tokens=128, seed=config.seed, seconds=0.9 * left)
        found[name] = {kind: count.per_pass for kind, count in counts.items()}
        texts = max(texts, counts[OVERALL].texts)
    return found, texts


def held_out_prompts(path: Path | None = None) -> list[Prompt]:
    """Read prompts that no training has used, kinds in alternation, so that a cut list still has all kinds."""
    source = path or files("draftproof.train") / "held_out.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    kinds: dict[str, list[Prompt]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(Prompt(row["kind"], row["prompt"]))
    most = max(len(prompts) for prompts in kinds.values())
    return [prompts[i] for i in range(most) for prompts in kinds.values() if i < len(prompts)]


def count_passes(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    *,
    max_tokens: int = 128,
    seed: int = 0,
    seconds: float = math.inf,
) -> dict[str, PassCounts]:
    """Count tokens and target passes by kind of prompt, and over all, for this many seconds.

    When the time is over, texts stay as short as they are and the remaining ones are left out. Prompts that are too
    long for the target are left out too.
    """
    ends = time.monotonic() + seconds
    used = [prompt for prompt in prompts if _fits(engine, prompt)]
    outputs = engine.generate(
        [prompt.text for prompt in used],
        [SamplingParams(**sampling, seed=seed + n) for n in range(len(used))],
        max_tokens=max_tokens,
        go_on=lambda: time.monotonic() < ends,
    )
    counts: dict[str, PassCounts] = {OVERALL: PassCounts()}
    for prompt, output in zip(used, outputs, strict=True):
        if output.finish_reason == "error":
            raise RuntimeError(output.error)
        if output.stats.rounds:
            counts.setdefault(prompt.kind, PassCounts()).add(output)
            counts[OVERALL].add(output)
    return counts


def _fits(engine: Engine, prompt: Prompt) -> bool:
    assert engine.tokenizer is not None
    max_length = engine.model.max_length
    return max_length is None or len(encode(prompt.text, engine.tokenizer)) + MIN_ANSWER_TOKENS <= max_length


def _block_without_kernels(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Apply the block rule's reference: compiling its kernels would take longer than the evaluation."""
    return block(p, draft, rng)
