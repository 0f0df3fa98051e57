"""What the target showed of each text, kept where it was made: a pass for a text once, and not once in every epoch.

A head of one layer costs a small part of what its target costs: asked anew each time, the teacher would take most of a
training. What is kept is small beside its logits: a few states for each position, out of which the rows of the head's
vocabulary make the law again (`Teacher.repeated`).
"""

from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.train.lockstep import Texts
from draftproof.train.teacher import Lesson, Taught, Teacher, sent

GPU_SHARE: Final = 0.8
"""Of a GPU's free memory, for notes and training together."""

CPU_BYTES: Final = 4 << 30


class Notes:
    """Lessons on these texts. `limit`: bytes that may be kept; what does not fit is asked of the teacher each time."""

    def __init__(self, teacher: Teacher, texts: Texts, limit: int) -> None:
        self._teacher, self._texts, self._limit = teacher, texts, limit
        self._known = torch.zeros(len(texts), dtype=torch.bool)
        self._kept: Taught | None = None

    @property
    def texts(self) -> int:
        return len(self._texts)

    @property
    def remembered(self) -> int:
        """Texts that the teacher need not read again."""
        return int(self._known.sum())

    @torch.no_grad()
    def lesson(self, rows: Int[Tensor, " n"], skip: int) -> Lesson:
        """On the texts in these rows, in any order; the first `skip` positions of each do not count."""
        if not self._teacher.tells:
            return self._teacher.lesson(self._texts.of(rows), skip)
        known = self._known[rows]
        old, new = rows[known], rows[~known]
        both = [self._recalled(old)] if len(old) else []
        if len(new):
            both.append(self._noted(new))
        taught = both[0] if len(both) == 1 else _joined(*both)
        return self._teacher.repeated(self._texts.of(torch.cat([old, new])), taught, skip)

    def _recalled(self, rows: Int[Tensor, " n"]) -> Taught:
        assert self._kept is not None
        at = sent(rows, self._kept.lse.device)
        return Taught.of_parts([part.index_select(0, at) for part in self._kept.parts])

    def _noted(self, rows: Int[Tensor, " n"]) -> Taught:
        """Taught anew, and kept where there is room: a text's place is its row."""
        made = self._teacher.taught(self._texts.of(rows))
        if self._kept is None:
            self._kept = self._empty(made)
        fits = rows < len(self._kept.lse)
        if fits.any():
            device = made.lse.device
            places, which = sent(rows[fits], device), sent(fits.nonzero().squeeze(1), device)
            for kept, part in zip(self._kept.parts, made.parts, strict=True):
                kept.index_copy_(0, places, part.index_select(0, which))
            self._known[rows[fits]] = True
        return made

    def _empty(self, like: Taught) -> Taught:
        """Room for as many texts as the limit allows."""
        of_one = sum(part[0].numel() * part.dtype.itemsize for part in like.parts)
        room = min(len(self._texts), self._limit // of_one)
        return Taught.of_parts([part.new_empty(room, *part.shape[1:]) for part in like.parts])


def room_on(device: torch.device, training: int) -> int:
    """Bytes for notes there, beside a training that needs so many."""
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()  # what was allocated for the data is free, but no one else could see it
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(GPU_SHARE * free) - training)


def _joined(first: Taught, second: Taught) -> Taught:
    return Taught.of_parts([torch.cat(parts) for parts in zip(first.parts, second.parts, strict=True)])
