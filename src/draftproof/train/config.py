"""Configure a training run: its options, its learning schedule, its time budget, and the folder it resumes from."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

DEFAULT_VOCAB: Final = 8192
"""Tokens of the head's vocabulary when none is given: the most frequent ones cover nearly all of an answer."""

LEARNING_RATE: Final = 1e-3
"""Peak learning rate of a new head."""

CONTINUED_LEARNING_RATE: Final = 5e-4
"""Peak learning rate of a head that continues another: at the full rate it would first forget what it knows."""

SINGLE_STEP_SHARE: Final = 0.25
"""Share of the training in which only a draft's first token is trained. Unrolled from the start, a head learns slowly;
never unrolled, it fails at its second token (docs/decisions.md)."""

DATA_SHARE: Final = 0.25
EVALUATION_SHARE: Final = 0.1
"""Default shares of the total time for generating texts and for the evaluation; training takes the rest."""

FREE_TO_CHANGE: Final = frozenset(
    {"target", "out", "minutes", "data", "counts", "device", "name", "licence", "prompts"}
)
"""Options that a resumed run may change. Changing any other would train a different head."""


EXPORT_FORMATS: Final = ("speculators",)
"""Formats that a head can be exported to (models/head/export.py)."""


class PausedError(Exception):
    """Raised when a run has used up the time given to one process; its work is saved."""


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """The hyperparameters of the optimisation.

    `single_step_share` is the share of the training in which the head is not unrolled.
    """

    depth: int = 5
    batch: int = 24
    learning_rate: float = 1e-3
    seed: int = 0
    single_step_share: float = SINGLE_STEP_SHARE

    def check(self) -> None:
        """Refuse values that cannot be trained with."""
        if self.depth < 1 or self.batch < 1:
            raise ValueError(f"depth and batch must be ≥ 1; got {self.depth} and {self.batch}")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must be between 0 and 1; got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The options of a training run.

    target   "smollm2" (bundled), a folder or a hub id; `name` is the display name
    out      the folder of the head
    start    the folder of a head of the same target whose weights this one starts from. It is unrolled from the first
             step, trains at half the learning rate, and needs another seed: the same seed would generate the same texts
    minutes  the time for everything: data, training, evaluation
    data     the share of that time for generating texts; the default depends on the device (api.py)
    counts   whether the head is evaluated in the engine's loop at the end
    vocab    the size of the head's vocabulary; default 8192, or all tokens of a smaller target
    depth    the draft length it is trained for
    length   tokens of a text. All but two are training positions; GPUs prefer a multiple of 8 positions
    batch    texts of a step
    export   a format of models/head/export.py in which the head is also written, to the folder `exported`. Such a head
             reads other layers: a reader of that format gets no normed states of the last layer
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
    export: str | None = None

    def __post_init__(self) -> None:
        if self.export is not None and self.export not in EXPORT_FORMATS:
            raise ValueError(f"export={self.export!r}: heads can be exported to {', '.join(EXPORT_FORMATS)}")
        if not self.minutes > 0:
            raise ValueError(f"minutes must be more than 0; got {self.minutes}")
        self.schedule.check()
        if self.data is not None and not 0 < self.data < 1:
            raise ValueError(f"data={self.data}: a share of the time, between 0 and 1; 0.3 is usual")
        if self.length < 32:
            raise ValueError(f"length={self.length}: a text needs at least 32 tokens to learn drafts from")

    @property
    def schedule(self) -> TrainingSchedule:
        default = CONTINUED_LEARNING_RATE if self.start else LEARNING_RATE
        rate = self.learning_rate if self.learning_rate is not None else default
        single_step_share = 0.0 if self.start else SINGLE_STEP_SHARE
        return TrainingSchedule(self.depth, self.batch, rate, self.seed, single_step_share)

    @property
    def target_name(self) -> str:
        """Return the target's display name: never a path of this machine."""
        return self.name or (Path(self.target).name if Path(self.target).exists() else self.target)

    @property
    def exported(self) -> Path:
        return self.out / (self.export or "")

    @property
    def command(self) -> str:
        """Return the command line that trains such a head again, without the paths of this machine."""
        target = Path(self.target).name if Path(self.target).exists() else self.target
        options = {"target": target, "out": self.out.name, "minutes": f"{self.minutes:g}"}
        if self.start:
            options["start"] = self.start.name
        if self.export:
            options["export"] = self.export
        numbers = {**asdict(self), "learning_rate": self.schedule.learning_rate}
        for name in ("data", "vocab", "depth", "seed", "length", "batch", "learning_rate"):
            if numbers[name] is not None:
                options[name] = f"{numbers[name]:g}"
        return "draftproof train " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values, with the learning rate that is used."""
        options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**options, "learning_rate": self.schedule.learning_rate}


@dataclass(slots=True)
class Budget:
    """The seconds that a run may take, split into data, training and evaluation.

    before      seconds that earlier processes of this run have spent
    pause       seconds after which this process has to stop
    evaluation  the most seconds that the evaluation may take
    data        the share for generating texts
    """

    seconds: float
    before: float = 0.0
    pause: float | None = None
    evaluation: float = math.inf
    data: float = DATA_SHARE
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
        """Return the value of `spent` at which the texts must be complete."""
        return self.data * self.seconds

    @property
    def training_ends(self) -> float:
        return self.seconds - self.for_evaluation

    def left_until(self, moment: float) -> float:
        return moment - self.spent

    @property
    def for_evaluation(self) -> float:
        return min(EVALUATION_SHARE * self.seconds, self.evaluation)

    def check_pause(self, needed: float = 0.0) -> None:
        """Raise `PausedError` unless this process has `needed` seconds left."""
        if self.pause is not None and self.clock() - self.began + needed > self.pause:
            raise PausedError(f"paused after {(self.clock() - self.began) / 60:.1f} minutes; --resume goes on")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder from which a run resumes: texts, checkpoint, and the seconds spent."""

    folder: Path
    config: TrainConfig

    @property
    def checkpoint(self) -> Path:
        return self.folder / "student.pt"

    @property
    def begun(self) -> bool:
        return (self.folder / "state.json").is_file()

    @property
    def spent(self) -> float:
        return float(self._state()["spent"]) if self.begun else 0.0

    def save_spent(self, seconds: float) -> None:
        """Save the seconds spent so far by all processes of this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / "state.part"
        state = {"plan": self.config.as_json(), "spent": seconds}
        unfinished.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(self.folder / "state.json")

    def check_config(self) -> None:
        """Refuse to resume with other options than the run began with."""
        began = self._state()["plan"]
        for name, value in self.config.as_json().items():
            if name not in FREE_TO_CHANGE and began.get(name) != value:
                raise ValueError(
                    f"{self.folder.parent} was begun with {name}={began.get(name)}, and now it is {value}: a run "
                    "cannot change its options. Give the same options, or another --out"
                )

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        return state


def open_run_folder(config: TrainConfig, resume: bool) -> RunFolder:
    """Return the run folder inside `config.out`: an existing one with `resume`, else one that is created later.

    A new folder is created with the first thing saved, so that a refused run creates no files.
    """
    run_folder = RunFolder(config.out / "work", config)
    if resume and not run_folder.begun:
        raise ValueError(f"there is nothing to resume in {config.out}: leave out --resume to begin")
    if not resume and config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ValueError(f"{config.out} exists and is not empty: give --resume to go on with it, or another --out")
    if resume:
        run_folder.check_config()
    return run_folder
