"""A head that learns: one step of training, its schedule, and what must be kept to go on later."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from draftproof.models.bundled.download import sha256
from draftproof.models.head.file import WEIGHTS, HeadMeta, check_target, load
from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import shape_for
from draftproof.train.config import Budget, Course, Plan, Workplace
from draftproof.train.loss import distance
from draftproof.train.target import Lesson, Notes
from draftproof.train.unroll import unroll


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


LOOK: Final = 64

LOOK_SECONDS: Final = 5.0
"""Steps between two looks at the marks, of which each waits for all that a GPU was given to do; seconds, where steps
are long."""

CHECKPOINT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is. `accepted`: the acceptance at each step of the draft that is being trained;
    `step_ms`: what a step has taken lately."""

    share: float
    steps: int
    loss: float
    accepted: list[float]
    step_ms: float


@dataclass(slots=True)
class Study:
    """A student and its lessons. `began`: what had been spent when the training began."""

    student: Student
    notes: Notes
    budget: Budget
    place: Workplace
    began: float
    history: list[dict[str, object]]

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train until the budget says that the evaluation is due."""
        if self.share >= 1:
            return
        marks, saved = self._marks(), self.budget.spent
        looked = before = saved
        for lesson in self._lessons():
            self.student.learn(lesson, self.share, marks)
            now = self.budget.spent
            last = self.budget.left_until(self.budget.training_ends) < now - before
            before = now
            if last or self.student.steps % LOOK == 0 or now - looked > LOOK_SECONDS:
                looked = self._tell(marks, looked, report)
                marks = self._marks()
                if now - saved > CHECKPOINT_SECONDS:
                    saved = self.save()
                self._pause()
            if last:
                break
        self.save()

    @property
    def share(self) -> float:
        return min(1.0, (self.budget.spent - self.began) / max(1e-9, self.budget.training_ends - self.began))

    def save(self) -> float:
        """Keep what was learnt, and say when."""
        spent = self.budget.spent
        self.student.save(self.place.checkpoint, began=self.began, history=self.history)
        self.place.spend(spent)
        return spent

    def _marks(self) -> Marks:
        return Marks.none(self.student.course.depth, self.student.device)

    def _tell(self, marks: Marks, looked: float, report: Callable[[Progress], None]) -> float:
        """Say how it went since one last looked, and when it is: a GPU has done by then what it was given to do."""
        loss, accepted = marks.read()
        spent = self.budget.spent
        step_ms = 1000 * (spent - looked) / marks.lessons
        now = Progress(self.share, self.student.steps, loss, accepted, step_ms)
        self.history.append({"steps": now.steps, "loss": loss, "accepted": accepted, "step_ms": round(step_ms, 2)})
        report(now)
        return spent

    def _pause(self) -> None:
        try:
            self.budget.check_pause()
        except Exception:
            self.save()
            raise

    def _lessons(self) -> Iterator[Lesson]:
        course = self.student.course
        batch = min(course.batch, self.notes.texts)
        for rows in batches(self.notes.texts, batch, course.seed, self.student.steps):
            lesson = self.notes.lesson(rows, course.depth)
            if len(lesson.at):
                yield lesson


def batches(texts: int, batch: int, seed: int, first: int) -> Iterator[Int[Tensor, " n"]]:
    """The texts of every batch from number `first` on and without end, every epoch in its own order."""
    in_epoch = texts // batch
    epoch, at = divmod(first, in_epoch)
    while True:
        order = _order(texts, seed, epoch)
        for number in range(at, in_epoch):
            yield order[number * batch : (number + 1) * batch]
        epoch, at = epoch + 1, 0


def _order(count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
