"""A head, from nothing to its figures: the target talks, the head learns, the engine tries it."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from draftproof.engine.load import load
from draftproof.models.attention import steady_attention
from draftproof.models.compatibility import head_size
from draftproof.models.head.file import meta_for, save
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from draftproof.models.hf import HFModel
from draftproof.train import report as reports
from draftproof.train.config import DATA, DEFAULT_VOCAB, Budget, Plan, Workplace, workplace
from draftproof.train.data import Corpus, corpus, ends_of, frequent
from draftproof.train.evaluate import examine, tried
from draftproof.train.report import Figures
from draftproof.train.target import Notes, TargetSignals, counted, room_on
from draftproof.train.trainer import Origin, Progress, Student, Study, needs, origin

EXAM: Final = 0.2
"""Of the time for the evaluation: the rest is the loop's."""

GPU_EVALUATION: Final = 45.0
CPU_EVALUATION: Final = 600.0
"""Seconds in which all prompts are answered, and a little more."""

GPU_EXAM: Final = 6.0
CPU_EXAM: Final = 60.0
"""Seconds of an evaluation without them."""

GPU_DATA: Final = 0.4
"""Of the time, for texts, where a training reads a text in less than a tenth of the time in which it was made: more
texts are worth more there than more epochs."""

GPU_LATER_DATA: Final = 0.34
"""The same for a head that goes on: it has read others before."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how it goes: a stage and its share; a training's progress; a line of news."""

    stage: Callable[[str, float], None] = lambda stage, share: None
    progress: Callable[[Progress], None] = lambda progress: None
    say: Callable[[str], None] = lambda line: None


def train(
    plan: Plan,
    *,
    resume: bool = False,
    pause: float | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Figures:
    """Train a head into `plan.out`; the figures, which also lie there.

    `resume` goes on with what lies in the folder. After `pause` seconds the work is put aside (`PausedError`).
    """
    watch = watch or Watch()
    place = workplace(plan, resume)
    budget = Budget(60 * plan.minutes, place.spent, pause, *_shares(plan), clock)
    try:
        with steady_attention(_device(plan)):
            figures = _learnt(place, budget, watch)
            if plan.counts:
                made = tried(plan, _device(plan), budget, watch.stage)
                figures["tokens_per_pass"], figures["texts_in_the_loop"] = made
    finally:
        if place.begun:
            place.spend(budget.spent)
    figures["seconds"]["all"] = budget.spent
    _write(plan, figures)
    if not reports.plot(figures, plan.out / "acceptance.png"):
        watch.say("no plot: that needs matplotlib (pip install 'draftproof[plot]')")
    return figures


def _shares(plan: Plan) -> tuple[float, float]:
    """The most seconds that the evaluation takes, and the share of the data."""
    if not _on_gpu(plan):
        return CPU_EVALUATION if plan.counts else CPU_EXAM, plan.data or DATA
    return GPU_EVALUATION if plan.counts else GPU_EXAM, plan.data or (GPU_LATER_DATA if plan.start else GPU_DATA)


def _learnt(place: Workplace, budget: Budget, watch: Watch) -> Figures:
    """Data, training, and the head on disk: there as soon as it has been trained, whatever becomes of the rest."""
    plan = place.plan
    model, tokenizer = _target(plan)
    begun = origin(plan, model)
    texts = corpus(place, model, tokenizer, budget, watch.stage)
    watch.say(f"{len(texts.train)} texts of {texts.train.tokens.shape[1]} tokens")
    teacher = _teacher(plan, model, tokenizer, texts)
    study = _study(place, begun.head.to(model.device), teacher, texts, budget)
    study.run(watch.progress)
    figures = _figures(plan, budget, texts, study, begun)
    _keep(plan, figures, study.student, teacher, model)
    budget.check_pause(budget.for_evaluation)
    seconds = (EXAM if plan.counts else 1.0) * budget.left_until(budget.seconds)
    figures["held_out"] = asdict(examine(study.student, teacher, texts.held_out, seconds))
    _keep(plan, figures, study.student, teacher, model)
    return figures


def _keep(plan: Plan, figures: Figures, student: Student, teacher: TargetSignals, model: PreTrainedModel) -> None:
    """The head and its figures, as far as they are known."""
    training = {name: value for name, value in figures.items() if name != "history"}
    ids = tuple(teacher.ids.tolist())
    save(plan.out, student.average, meta_for(model, ids, target=plan.called, training=training, licence=plan.licence))
    _write(plan, figures)


def _target(plan: Plan) -> tuple[PreTrainedModel, Any]:
    """The target as transformers has it; everything the engine would refuse is refused here."""
    engine = load(plan.target, None, device=plan.device, pack=False)
    if not isinstance(engine.model, HFModel):
        raise ValueError(f"{plan.called} has an encoder: heads are for decoder-only models")
    if engine.tokenizer is None:
        raise ValueError(f"{plan.called} has no tokenizer, and its texts begin with words")
    vocab = head_size(engine.hf)
    if plan.vocab is not None and not 1 <= plan.vocab <= vocab:
        raise ValueError(f"vocab={plan.vocab}: {plan.called} has {vocab} tokens; give 1 to {vocab}")
    return engine.hf, engine.tokenizer


def _teacher(plan: Plan, model: PreTrainedModel, tokenizer: Any, texts: Corpus) -> TargetSignals:
    vocab = plan.vocab or min(DEFAULT_VOCAB, head_size(model))
    ids = frequent(texts.train, head_size(model), vocab, ends_of(model, tokenizer))
    return TargetSignals(model, shape_for(model).taps, ids)


def _study(place: Workplace, head: Head, teacher: TargetSignals, texts: Corpus, budget: Budget) -> Study:
    """A student that begins with this head, or the one of the checkpoint."""
    plan = place.plan
    if not len(counted(texts.train, plan.depth)):
        raise ValueError(
            f"{plan.called} answered nothing in {len(texts.train)} texts of {texts.train.tokens.shape[1]} tokens: "
            "there is nothing to learn from. Give more --minutes or a longer --length"
        )
    student = Student(head, teacher.rows, plan.course)
    began, history = budget.spent, list[dict[str, object]]()
    if place.checkpoint.exists():
        kept = student.restore(place.checkpoint)
        began, history = kept["began"], kept["history"]
    length = texts.train.tokens.shape[1]
    needed = needs(student.head.shape, plan.course, length) + teacher.needs(plan.batch * length)
    notes = Notes(teacher, texts.train, room_on(student.device, needed))
    return Study(student, notes, budget, place, began, history)


def _figures(plan: Plan, budget: Budget, texts: Corpus, study: Study, begun: Origin) -> Figures:
    took = replace(plan, minutes=max(plan.minutes, round(budget.spent / 60, 1)))  # told fewer on the way, it took these
    start = plan.start and plan.start.name
    return {
        "command": took.command,
        "plan": {**plan.as_json(), "target": plan.called, "out": plan.out.name, "start": start, "prompts": None},
        "origin": begun.told,
        "versions": reports.versions(),
        "texts": len(texts.train),
        "tokens": texts.tokens,
        "steps": study.student.steps,
        "epochs": study.student.steps * study.student.course.batch / len(texts.train),
        "seconds": {"data": study.began, "training": budget.spent - study.began},
        "step_ms": reports.step_ms(study.history),
        "texts_remembered": study.notes.remembered,
        "history": study.history,
    }


def _device(plan: Plan) -> torch.device:
    return torch.device(plan.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_gpu(plan: Plan) -> bool:
    return _device(plan).type == "cuda"


def _write(plan: Plan, figures: Figures) -> None:
    path: Path = plan.out / "figures.json"
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
