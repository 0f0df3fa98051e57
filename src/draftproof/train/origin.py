"""The head that a training begins with: a new one, or one that was trained before and goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftproof.models.head import Head
from draftproof.models.headfile import WEIGHTS, HeadMeta, check_target, load
from draftproof.models.tapped import shape_for
from draftproof.models.wheel import sha256
from draftproof.train.plan import Plan
from draftproof.train.student import new_head


@dataclass(frozen=True, slots=True)
class Origin:
    """`told`: what the figures say of it, so that the whole way to a head can be gone again; None of a new head."""

    head: Head
    told: dict[str, Any] | None = None


def origin(plan: Plan, model: PreTrainedModel) -> Origin:
    """In float32 on the CPU, ready to learn; refused if it is no head of this target."""
    if plan.start is None:
        return Origin(new_head(model, plan.seed))
    head, meta = load(plan.start)
    check_target(meta, model)
    _check_shape(head, model, plan.start)
    told = _told(plan.start, meta)
    _check_seed(plan, told)
    return Origin(head.requires_grad_(True), told)


def _told(start: Path, meta: HeadMeta) -> dict[str, Any]:
    """Its name, its weights' sha256, and how it came to be: its own origin too, if it had one."""
    known = {name: meta.training.get(name) for name in ("command", "versions", "texts", "steps", "seconds", "origin")}
    known["seed"] = meta.training.get("plan", {}).get("seed")
    told = {"name": start.resolve().name, "sha256": sha256(start / WEIGHTS), "vocab": len(meta.ids)}
    return told | {name: value for name, value in known.items() if value is not None}


def _check_shape(head: Head, model: PreTrainedModel, start: Path) -> None:
    wanted = shape_for(model)
    if head.shape != wanted:
        raise ValueError(f"{start} holds a head of shape {head.shape}, and trained is one of shape {wanted}")


def _check_seed(plan: Plan, told: dict[str, Any]) -> None:
    """Refuse to teach a head what it has read: texts follow from the seed."""
    before: dict[str, Any] | None = told
    while before:
        if before.get("seed") == plan.seed:
            raise ValueError(
                f"seed={plan.seed} made the texts that {before['name']} was trained on, and would make them again: "
                "give another --seed"
            )
        before = before.get("origin")
