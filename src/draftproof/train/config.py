"""What a training is asked to do, and the folder in which it does it: a run that was ended goes on from there."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

SINGLE: Final = 0.25
"""The share of the training in which only a draft's first token is learnt: unrolled from the start, a head learns
slowly; never unrolled, it fails at its second token (docs/decisions.md)."""


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


DEFAULT_VOCAB: Final = 8192
LEARNING_RATE: Final = 1e-3
LATER_RATE: Final = 5e-4
"""Of a head that goes on from another: at the full rate it would first forget what it is to keep."""

FREE_TO_CHANGE: Final = frozenset(
    {"target", "out", "minutes", "data", "counts", "device", "name", "licence", "prompts"}
)
"""What a run that goes on may be told anew; the rest would make another head."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A training.

    target   "smollm2" (bundled), a folder or a hub id; `name` is what people call it
    out      the folder of the head
    start    the folder of a head of the same target, with whose weights this one begins. It is unrolled from the first
             step, learns at half the rate, and needs a seed of its own: with the same it would read the same texts
    minutes  for everything: data, training, evaluation
    data     their share for the making of texts; the default depends on the machine (train.py)
    counts   whether the head is tried in the engine's loop at the end
    vocab    tokens that the head can say; default 8192, or all that the target has
    depth    tokens of the drafts it is trained for
    length   tokens of a text, of which all but two are positions of the head: 8 divides their number, as GPUs like it
    batch    texts of a step
    """

    target: str
    out: Path
    start: Path | None = None
    minutes: float = 30.0
    data: float | None = None
    counts: bool = True
    vocab: int | None = None
    depth: int = 5
    seed: int = 0
    length: int = 642
    batch: int = 24
    learning_rate: float | None = None
    device: str | None = None
    name: str | None = None
    licence: str = "that of the target's weights"
    prompts: Path | None = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes must be more than 0; got {self.minutes}")
        self.course.check()
        if self.data is not None and not 0 < self.data < 1:
            raise ValueError(f"data={self.data}: a share of the time, between 0 and 1; 0.3 is usual")
        if self.length < 32:
            raise ValueError(f"length={self.length}: a text needs at least 32 tokens to learn drafts from")

    @property
    def course(self) -> Course:
        rate = self.learning_rate if self.learning_rate is not None else LATER_RATE if self.start else LEARNING_RATE
        return Course(self.depth, self.batch, rate, self.seed, single=0.0 if self.start else SINGLE)

    @property
    def called(self) -> str:
        return self.name or (Path(self.target).name if Path(self.target).exists() else self.target)

    @property
    def command(self) -> str:
        """What makes such a head again, wherever its folders are."""
        target = Path(self.target).name if Path(self.target).exists() else self.target
        asked = {"target": target, "out": self.out.name, "minutes": f"{self.minutes:g}"}
        if self.start:
            asked["start"] = self.start.name
        numbers = {**asdict(self), "learning_rate": self.course.learning_rate}
        for name in ("data", "vocab", "depth", "seed", "length", "batch", "learning_rate"):
            if numbers[name] is not None:
                asked[name] = f"{numbers[name]:g}"
        return "draftproof train " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items())

    def as_json(self) -> dict[str, Any]:
        told = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**told, "learning_rate": self.course.learning_rate}


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folder with all that a run leaves to the next: texts, checkpoint, and what was spent."""

    folder: Path
    plan: Plan

    @property
    def checkpoint(self) -> Path:
        return self.folder / "student.pt"

    @property
    def begun(self) -> bool:
        return (self.folder / "state.json").is_file()

    @property
    def spent(self) -> float:
        return float(self._state()["spent"]) if self.begun else 0.0

    def spend(self, seconds: float) -> None:
        """Write down what was spent so far, all runs together."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / "state.part"
        state = {"plan": self.plan.as_json(), "spent": seconds}
        unfinished.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(self.folder / "state.json")

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        return state

    def check(self) -> None:
        """Refuse to go on with another plan than the run began with."""
        began = self._state()["plan"]
        for name, value in self.plan.as_json().items():
            if name not in FREE_TO_CHANGE and began.get(name) != value:
                raise ValueError(
                    f"{self.folder.parent} was begun with {name}={began.get(name)}, and now it is {value}: a head "
                    "cannot change its plan. Give the same options, or another --out"
                )


def workplace(plan: Plan, resume: bool) -> Workplace:
    """The folder to work in: a new one, made when there is something to keep, or with `resume` that which is there."""
    place = Workplace(plan.out / "work", plan)
    if resume and not place.begun:
        raise ValueError(f"there is nothing to go on with in {plan.out}: leave out --resume to begin")
    if not resume and plan.out.exists() and (not plan.out.is_dir() or any(plan.out.iterdir())):
        raise ValueError(f"{plan.out} exists and is not empty: give --resume to go on with it, or another --out")
    if resume:
        place.check()
    return place
