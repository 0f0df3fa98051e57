"""A head that has been trained, tried in the engine's own loop."""

from collections.abc import Callable
from typing import Any, Final

import torch

from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.types import Draft, Verdict
from draftproof.engine.load import load
from draftproof.train.budget import Budget
from draftproof.train.in_loop import SAMPLINGS, held_out, tallies
from draftproof.train.plan import Plan
from draftproof.verify.block import block

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


def _by_reference(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """The default rule, but not by its name: its kernels would be compiled for longer than the evaluation may take."""
    return block(p, draft, noise)
