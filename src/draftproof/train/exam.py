"""How a head fares on texts it has not seen, step by step of the draft and with the true text before it.

That flatters: a draft's rounds begin at hard tokens. What counts is the loop (in_loop.py).
"""

import time
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.train.lockstep import Texts
from draftproof.train.loss import CHUNK
from draftproof.train.student import Student
from draftproof.train.teacher import Lesson, Teacher

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
def examine(student: Student, teacher: Teacher, texts: Texts, seconds: float) -> Exam:
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
        mass += float(_law(lesson).sum())
        for step, out in enumerate(student.outs(lesson, depth, student.average)):
            sums[:, step] += _compared(out, student.rows, lesson)
    shares = (sums / max(1, positions)).tolist()
    return Exam(seen, positions, mass / max(1, positions), shares[0], shares[1])


def _compared(out: Float[Tensor, "M H"], rows: Float[Tensor, "R H"], lesson: Lesson) -> Float[Tensor, "2"]:
    """Sums over positions: of the common mass, and of equal first choices."""
    sums = torch.zeros(2, dtype=torch.float64)
    for part in torch.arange(len(out)).split(CHUNK):
        q = (out[part].to(rows.dtype) @ rows.T).float().softmax(-1)
        sums[0] += float(torch.minimum(q, _law(lesson, part)).sum())
        sums[1] += float((q.argmax(-1) == lesson.best[part]).sum())
    return sums


def _law(lesson: Lesson, part: Int[Tensor, " m"] | slice = slice(None)) -> Float[Tensor, "m R"]:
    return (lesson.scores[part].float() - lesson.lse[part, None]).exp()
