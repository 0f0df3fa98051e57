"""A time budget that is kept: what is spent on data, on training and on the evaluation, also over several runs."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

DATA: Final = 0.25
EVALUATION: Final = 0.1
"""Shares of the whole, where nothing else is said; training takes the rest."""


class PausedError(Exception):
    """A run has used up what one process was given; what it did is kept."""


@dataclass(slots=True)
class Budget:
    """Seconds for the whole work.

    before      what earlier runs have spent
    pause       how long this one may go on
    evaluation  the most that an evaluation takes, however long the rest
    data        the share of the data
    """

    seconds: float
    before: float = 0.0
    pause: float | None = None
    evaluation: float = math.inf
    data: float = DATA
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"minutes must be more than 0; got {self.seconds / 60:g}")
        self.began = self.clock()

    @property
    def spent(self) -> float:
        return self.before + self.clock() - self.began

    @property
    def data_ends(self) -> float:
        """When `spent` says that the data has to be there."""
        return self.data * self.seconds

    @property
    def training_ends(self) -> float:
        return self.seconds - self.for_evaluation

    def left_until(self, moment: float) -> float:
        return moment - self.spent

    @property
    def for_evaluation(self) -> float:
        return min(EVALUATION * self.seconds, self.evaluation)

    def check_pause(self, needed: float = 0.0) -> None:
        """Pause unless there is still time for what needs so many seconds."""
        if self.pause is not None and self.clock() - self.began + needed > self.pause:
            raise PausedError(f"paused after {(self.clock() - self.began) / 60:.1f} minutes; --resume goes on")
