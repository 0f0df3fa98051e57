"""A head that learns: one step of training, its schedule, and what must be kept to go on later."""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from draftproof.models.head import Head, HeadShape
from draftproof.models.tapped import shape_for
from draftproof.train.loss import distance
from draftproof.train.teacher import Lesson
from draftproof.train.unroll import unroll

SINGLE: Final = 0.25
"""The share of the training in which only a draft's first token is learnt: unrolled from the start, a head learns
slowly; never unrolled, it fails at its second token (docs/decisions.md)."""

BLEND: Final = 0.4
"""Of the acceptance in the loss, once a head is unrolled."""

DECAY: Final = 0.8
"""What a step further in the draft counts: it matters only if all before it stood."""

WARM: Final = 100
"""Steps until the full learning rate."""

LEAST_RATE: Final = 0.02
"""Of the learning rate, at the end."""

FINAL_NORMS: Final = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""What families call the norm before their output rows."""

MEMORY: Final = 0.999
"""What the average of the weights keeps of itself at a step."""


@dataclass(frozen=True, slots=True)
class Course:
    """How a head is taught. `single`: the share of the training in which it is not unrolled."""

    depth: int = 5
    batch: int = 24
    learning_rate: float = 1e-3
    seed: int = 0
    single: float = SINGLE

    def check(self) -> None:
        if self.depth < 1 or self.batch < 1:
            raise ValueError(f"depth and batch must be ≥ 1; got {self.depth} and {self.batch}")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must be between 0 and 1; got {self.learning_rate}")


@dataclass(slots=True)
class Marks:
    """How lessons went since one last looked: sums on the device, so that nobody waits for them."""

    loss: Tensor
    overlap: Tensor
    steps: Tensor
    lessons: int = 0

    @classmethod
    def none(cls, depth: int, device: torch.device) -> "Marks":
        return cls(torch.zeros((), device=device), torch.zeros(depth, device=device), torch.zeros(depth, device=device))

    def note(self, loss: Tensor, overlaps: list[Tensor]) -> None:
        self.loss += loss.detach()
        self.lessons += 1
        self.overlap[: len(overlaps)] += torch.stack([overlap.mean() for overlap in overlaps])
        self.steps[: len(overlaps)] += 1

    def read(self) -> tuple[float, list[float]]:
        """Mean loss, and the acceptance of each step that was trained."""
        trained = [step for step, count in enumerate(self.steps.tolist()) if count]
        accepted = (self.overlap / self.steps.clamp(min=1)).tolist()
        return float(self.loss) / max(1, self.lessons), [accepted[step] for step in trained]


@dataclass(slots=True)
class Student:
    """A head in training, in float32; on a GPU its products are made in bfloat16.

    `average`: the head with the mean of its latest weights, which is worth more than the last of them.
    """

    head: Head
    rows: Float[Tensor, "R H"]
    course: Course
    steps: int = 0
    optimizer: torch.optim.AdamW = field(init=False)
    average: Head = field(init=False)

    def __post_init__(self) -> None:
        self.head.train()
        self.average = copy.deepcopy(self.head).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self.course.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=self.device.type == "cuda",
        )

    @property
    def device(self) -> torch.device:
        return self.head.norm.weight.device

    def learn(self, lesson: Lesson, progress: float, marks: Marks) -> None:
        """One step. `progress`: the share of the training that is over."""
        depth, blend = (1, 0.0) if progress < self.course.single else (self.course.depth, BLEND)
        for group in self.optimizer.param_groups:
            group["lr"] = self.course.learning_rate * rate(self.steps, progress)
        outs = self.outs(lesson, depth, self.head)
        fared = [distance(out, self.rows, lesson.scores, lesson.lse, blend) for out in outs]
        losses, overlaps = zip(*fared, strict=True)
        weights = [DECAY**step for step in range(depth)]
        loss = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mix = get_ema_multi_avg_fn(memory(self.steps))
        mix(tuple(self.average.parameters()), tuple(self.head.parameters()), self.steps)
        self.steps += 1
        marks.note(loss, list(overlaps))

    def outs(self, lesson: Lesson, depth: int, head: Head) -> list[Float[Tensor, "M H"]]:
        """What the output rows score, at each step of the draft and each position that counts."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            outs = unroll(head, lesson.embedded, lesson.states, depth)
        return [out.flatten(0, 1).index_select(0, lesson.at).float() for out in outs]

    def save(self, path: Path, **more: Any) -> None:
        """Under another name first: a run that is killed here leaves the checkpoint before."""
        unfinished = path.with_suffix(".part")
        parts: dict[str, Any] = {"head": self.head, "average": self.average, "optimizer": self.optimizer}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "steps": self.steps, **more}, unfinished)
        unfinished.rename(path)

    def restore(self, path: Path) -> dict[str, Any]:
        """Go on where `save` was; what else was kept is returned."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        self.head.load_state_dict(state.pop("head"))
        self.average.load_state_dict(state.pop("average"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.steps = state.pop("steps")
        return state


def new_head(model: PreTrainedModel, seed: int) -> Head:
    """Untrained, with the target's final norm, if it is of the same kind: the output rows are used to it."""
    head = Head(shape_for(model), seed)
    inner = model.base_model
    norm = next((getattr(inner, name) for name in FINAL_NORMS if hasattr(inner, name)), None)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == head.norm.weight.shape:
        with torch.no_grad():
            head.norm.weight.copy_(weight)
    return head


def needs(shape: HeadShape, course: Course, length: int) -> int:
    """Bytes that a step keeps for its gradient, by a generous count: half precision in the products, float32 between
    them, and the weights of the attention; a step of the draft like another, and the taps like two."""
    of_position = 64 * shape.hidden + 10 * shape.intermediate + 6 * shape.heads * length
    return course.batch * length * (course.depth + 2) * of_position


def memory(steps: int) -> float:
    """What the average keeps of itself: less at first, or it would long be that of weights that know nothing."""
    return min(MEMORY, (1 + steps) / (10 + steps))


def rate(steps: int, progress: float) -> float:
    """The share of the learning rate: warmed up by steps, cooled down by time."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (steps + 1) / WARM) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)
