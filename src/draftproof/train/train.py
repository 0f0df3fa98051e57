"""A head, from nothing to its figures: the target talks, the head learns, the engine tries it."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.types import Draft, Verdict
from draftproof.engine.load import load
from draftproof.models.door import head_size
from draftproof.models.headfile import meta_for, save
from draftproof.models.hf import HFModel
from draftproof.models.steady import steady_attention
from draftproof.models.tapped import shape_for
from draftproof.train import report as reports
from draftproof.train.budget import DATA, Budget
from draftproof.train.corpus import Corpus, corpus, ends_of, frequent
from draftproof.train.exam import Exam, examine
from draftproof.train.in_loop import SAMPLINGS, held_out, tallies
from draftproof.train.notes import Notes, room_on
from draftproof.train.plan import DEFAULT_VOCAB, Plan, Workplace, workplace
from draftproof.train.report import Figures
from draftproof.train.student import Student, needs, new_head
from draftproof.train.study import Progress, Study
from draftproof.train.teacher import Teacher, counted
from draftproof.verify.block import block

DRAFTED: Final = 4
"""Tokens of a draft in the evaluation: what others are measured with."""

EXAM: Final = 0.2
"""Of the time for the evaluation: the rest is the loop's."""

GPU_BATCH: Final = 64
CPU_BATCH: Final = 8
GPU_EVALUATION: Final = 45.0
CPU_EVALUATION: Final = 600.0
"""Seconds in which all prompts are answered, and a little more."""

GPU_DATA: Final = 0.4
"""Of the time, for texts, where a training reads a text in less than a tenth of the time in which it was made: more
texts are worth more there than more epochs."""


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
    longest, data = (GPU_EVALUATION, GPU_DATA) if _on_gpu(plan) else (CPU_EVALUATION, DATA)
    budget = Budget(60 * plan.minutes, place.spent, pause, longest, data, clock)
    try:
        with steady_attention(_device(plan)):
            figures = _learnt(place, budget, watch)
            _write(plan, figures)  # whatever becomes of the evaluation
            figures["tokens_per_pass"], figures["texts_in_the_loop"] = _in_the_loop(plan, budget, watch)
    finally:
        place.spend(budget.spent)
    figures["seconds"]["all"] = budget.spent
    _write(plan, figures)
    if not reports.plot(figures, plan.out / "acceptance.png"):
        watch.say("no plot: that needs matplotlib (pip install 'draftproof[plot]')")
    return figures


def _learnt(place: Workplace, budget: Budget, watch: Watch) -> Figures:
    """Data, training, and the head on disk."""
    plan = place.plan
    model, tokenizer = _target(plan)
    texts = corpus(place, model, tokenizer, budget, watch.stage)
    watch.say(f"{len(texts.train)} texts of {texts.train.tokens.shape[1]} tokens")
    teacher = _teacher(plan, model, tokenizer, texts)
    study = _study(place, model, teacher, texts, budget)
    study.run(watch.progress)
    budget.check_pause(budget.for_evaluation)
    exam = examine(study.student, teacher, texts.held_out, EXAM * budget.left_until(budget.seconds))
    figures = _figures(plan, budget, texts, study, exam)
    training = {name: value for name, value in figures.items() if name != "history"}
    ids = tuple(teacher.ids.tolist())
    meta = meta_for(model, ids, target=plan.called, training=training, licence=plan.licence)
    save(plan.out, study.student.average, meta)
    return figures


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


def _teacher(plan: Plan, model: PreTrainedModel, tokenizer: Any, texts: Corpus) -> Teacher:
    vocab = plan.vocab or min(DEFAULT_VOCAB, head_size(model))
    ids = frequent(texts.train, head_size(model), vocab, ends_of(model, tokenizer))
    return Teacher(model, shape_for(model).taps, ids)


def _study(place: Workplace, model: PreTrainedModel, teacher: Teacher, texts: Corpus, budget: Budget) -> Study:
    """A new student, or the one of the checkpoint."""
    plan = place.plan
    if not len(counted(texts.train, plan.depth)):
        raise ValueError(
            f"{plan.called} answered nothing in {len(texts.train)} texts of {texts.train.tokens.shape[1]} tokens: "
            "there is nothing to learn from. Give more --minutes or a longer --length"
        )
    student = Student(new_head(model, plan.seed).to(model.device), teacher.rows, plan.course)
    began, history = budget.spent, list[dict[str, object]]()
    if place.checkpoint.exists():
        kept = student.restore(place.checkpoint)
        began, history = kept["began"], kept["history"]
    length = texts.train.tokens.shape[1]
    needed = needs(student.head.shape, plan.course, length) + teacher.needs(plan.batch * length)
    notes = Notes(teacher, texts.train, room_on(model.device, needed))
    return Study(student, notes, budget, place, began, history)


def _figures(plan: Plan, budget: Budget, texts: Corpus, study: Study, exam: Exam) -> Figures:
    return {
        "command": plan.command,
        "plan": {**plan.as_json(), "target": plan.called, "out": plan.out.name, "prompts": None},
        "versions": reports.versions(),
        "texts": len(texts.train),
        "tokens": texts.tokens,
        "steps": study.student.steps,
        "epochs": study.student.steps * study.student.course.batch / len(texts.train),
        "seconds": {"data": study.began, "training": budget.spent - study.began},
        "step_ms": reports.step_ms(study.history),
        "texts_remembered": study.notes.remembered,
        "held_out": asdict(exam),
        "history": study.history,
    }


def _in_the_loop(plan: Plan, budget: Budget, watch: Watch) -> tuple[dict[str, dict[str, float]], int]:
    """Tokens for each pass with drafts of DRAFTED tokens, as far as the time goes; float32, as on a CPU."""
    rows = GPU_BATCH if _on_gpu(plan) else CPU_BATCH
    how: dict[str, Any] = {"device": plan.device, "num_draft_tokens": DRAFTED, "max_batch": rows, "rule": _by_reference}
    engine = load(plan.target, f"head:{plan.out}", dtype=torch.float32, **how)
    prompts, found, texts = held_out(plan.prompts), dict[str, dict[str, float]](), 0
    for done, (name, sampling) in enumerate(SAMPLINGS.items()):
        watch.stage("evaluation", done / len(SAMPLINGS))
        left = budget.left_until(budget.seconds) / (len(SAMPLINGS) - done)
        made = tallies(engine, prompts, sampling, max_tokens=128, seed=plan.seed, seconds=0.9 * left)
        found[name] = {kind: tally.per_pass for kind, tally in made.items()}
        texts = max(texts, made["all"].texts)
    return found, texts


def _by_reference(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """The default rule, but not by its name: its kernels would be compiled for longer than the evaluation may take."""
    return block(p, draft, noise)


def _device(plan: Plan) -> torch.device:
    return torch.device(plan.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_gpu(plan: Plan) -> bool:
    return _device(plan).type == "cuda"


def _write(plan: Plan, figures: Figures) -> None:
    path: Path = plan.out / "figures.json"
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
