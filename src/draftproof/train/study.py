"""The training as it runs: batch after batch until its time is up, with a checkpoint now and then."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.train.budget import Budget
from draftproof.train.lockstep import Texts
from draftproof.train.plan import Workplace
from draftproof.train.student import Marks, Student
from draftproof.train.teacher import Lesson, Teacher

LOOK: Final = 32
LOOK_SECONDS: Final = 5.0
"""Steps between two looks at the marks, of which each waits for all that a GPU was given to do; seconds, where steps
are long."""

CHECKPOINT_SECONDS: Final = 60.0
MOST_LOGITS: Final = 8 << 30
"""Bytes of the target's logits in one pass of the teacher on a GPU."""

AHEAD: Final = 4
"""Batches for which the teacher runs at once there."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is. `accepted`: the acceptance at each step of the draft that is being trained."""

    share: float
    steps: int
    loss: float
    accepted: list[float]


@dataclass(slots=True)
class Study:
    """A student, its teacher and its texts. `began`: what had been spent when the training began."""

    student: Student
    teacher: Teacher
    texts: Texts
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
                self._tell(marks, report)
                marks, looked = self._marks(), now
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

    def _tell(self, marks: Marks, report: Callable[[Progress], None]) -> None:
        loss, accepted = marks.read()
        now = Progress(self.share, self.student.steps, loss, accepted)
        self.history.append({"steps": now.steps, "loss": loss, "accepted": accepted})
        report(now)

    def _pause(self) -> None:
        try:
            self.budget.check_pause()
        except Exception:
            self.save()
            raise

    def _lessons(self) -> Iterator[Lesson]:
        course = self.student.course
        batch = min(course.batch, len(self.texts))
        for some in batches(self.texts, batch, course.seed, self.student.steps, self._ahead(batch)):
            for lesson in self.teacher.lessons(some, batch, course.depth):
                if len(lesson.at):
                    yield lesson

    def _ahead(self, batch: int) -> int:
        if self.student.device.type != "cuda":
            return 1
        logits = 2 * batch * self.texts.tokens.shape[1] * self.teacher.vocab_size
        return max(1, min(AHEAD, MOST_LOGITS // logits))


def batches(texts: Texts, batch: int, seed: int, first: int, ahead: int) -> Iterator[Texts]:
    """Texts of up to `ahead` batches, from batch number `first` on and without end, every epoch in its own order."""
    in_epoch = len(texts) // batch
    number = first
    while True:
        epoch, at = divmod(number, in_epoch)
        count = min(ahead, in_epoch - at)
        rows = _order(len(texts), seed, epoch)[at * batch : (at + count) * batch]
        yield Texts(texts.tokens[rows], texts.spoken[rows])
        number += count


def _order(count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
