"""The training as it runs: batch after batch until its time is up, with a checkpoint now and then."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.train.budget import Budget
from draftproof.train.notes import Notes
from draftproof.train.plan import Workplace
from draftproof.train.student import Marks, Student
from draftproof.train.teacher import Lesson

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
