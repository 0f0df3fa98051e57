"""Train a drafting head from start to finish: generate texts with the target, train the head, evaluate it."""

import json
import shutil
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
from draftproof.models.head.export import export
from draftproof.models.head.file import meta_for, save
from draftproof.models.head.network import Head
from draftproof.models.hf import HFModel
from draftproof.train import report as reports
from draftproof.train.config import DATA_SHARE, DEFAULT_VOCAB, Budget, RunFolder, TrainConfig, open_run_folder
from draftproof.train.data import Corpus, end_tokens, frequent_tokens, make_corpus
from draftproof.train.evaluate import evaluate_held_out, tokens_per_pass
from draftproof.train.report import Figures
from draftproof.train.target import SignalCache, TargetSignals, cache_limit, trained_positions
from draftproof.train.trainer import HeadTrainer, InitialHead, Progress, TrainingRun, initial_head, step_bytes

HELD_OUT_SHARE: Final = 0.2
"""Share of the evaluation's time for the held-out texts; the rest is for the engine's loop."""

GPU_EVALUATION: Final = 45.0
CPU_EVALUATION: Final = 600.0
"""Most seconds of an evaluation with the engine's loop: enough to answer all prompts."""

GPU_HELD_OUT: Final = 6.0
CPU_HELD_OUT: Final = 60.0
"""Most seconds of an evaluation without the engine's loop."""

GPU_DATA_SHARE: Final = 0.4
"""Share of the time for generating texts on a GPU. Training on a text takes less than a tenth of the time of generating
it there, so more texts help more than more epochs."""

GPU_CONTINUED_DATA_SHARE: Final = 0.34
"""Share of the time for generating texts on a GPU if the head continues another, which has seen other texts."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Callbacks that follow a run: a stage and the share of it that is done, the training's progress, a message."""

    stage: Callable[[str, float], None] = lambda stage, share: None
    progress: Callable[[Progress], None] = lambda progress: None
    say: Callable[[str], None] = lambda line: None


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    pause: float | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Figures:
    """Train a head into `config.out` and return its figures, which are also saved there.

    `resume` continues the run in that folder. After `pause` seconds the run is saved and `PausedError` raised.
    """
    watch = watch or Watch()
    run_folder = open_run_folder(config, resume)
    budget = Budget(60 * config.minutes, run_folder.spent, pause, *_time_limits(config), clock)
    try:
        with steady_attention(_device(config)):
            figures = _train_and_save(run_folder, budget, watch)
            if config.counts:
                counts, texts = tokens_per_pass(config, _device(config), budget, watch.stage)
                figures["tokens_per_pass"], figures["texts_in_the_loop"] = counts, texts
    finally:
        if run_folder.begun:
            run_folder.save_spent(budget.spent)
    figures["verdict"] = reports.verdict(figures, config.minutes)
    figures["seconds"]["all"] = budget.spent
    _save_figures(config, figures)
    if not reports.plot(figures, config.out / "acceptance.png"):
        watch.say("no plot: that needs matplotlib (pip install 'draftproof[plot]')")
    return figures


def _train_and_save(run_folder: RunFolder, budget: Budget, watch: Watch) -> Figures:
    """Make the texts, train, and save the head: once before the held-out evaluation and once with its results."""
    config = run_folder.config
    model, tokenizer = _load_target(config)
    start = initial_head(config, model)
    texts = make_corpus(run_folder, model, tokenizer, budget, watch.stage)
    watch.say(f"{len(texts.train)} texts of {texts.train.tokens.shape[1]} tokens")
    signals = _target_signals(config, model, tokenizer, texts, start.head.shape.taps)
    run = _training_run(run_folder, start.head.to(model.device), signals, texts, budget)
    run.run(watch.progress)
    figures = _figures(config, budget, texts, run, start)
    _save_head(config, figures, run.trainer, signals, model)
    budget.check_pause(budget.for_evaluation)
    seconds = (HELD_OUT_SHARE if config.counts else 1.0) * budget.left_until(budget.seconds)
    figures["held_out"] = asdict(evaluate_held_out(run.trainer, signals, texts.held_out, seconds))
    _save_head(config, figures, run.trainer, signals, model)
    if config.export:
        shutil.rmtree(config.exported, ignore_errors=True)  # of an earlier part of this run
        export(config.out, config.exported, model)
    return figures


def _load_target(config: TrainConfig) -> tuple[PreTrainedModel, Any]:
    """Load the target as a transformers model; refuse whatever the engine would refuse."""
    engine = load(config.target, None, device=config.device, pack=False)
    if not isinstance(engine.model, HFModel):
        raise ValueError(f"{config.target_name} has an encoder: heads are for decoder-only models")
    if engine.tokenizer is None:
        raise ValueError(f"{config.target_name} has no tokenizer, and training texts begin with words")
    vocab = head_size(engine.hf)
    if config.vocab is not None and not 1 <= config.vocab <= vocab:
        raise ValueError(f"vocab={config.vocab}: {config.target_name} has {vocab} tokens; give 1 to {vocab}")
    return engine.hf, engine.tokenizer


def _target_signals(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any, texts: Corpus, taps: tuple[int, ...]
) -> TargetSignals:
    """Choose the head's vocabulary from the texts, and wrap the target for training."""
    vocab = config.vocab or min(DEFAULT_VOCAB, head_size(model))
    ids = frequent_tokens(texts.train, head_size(model), vocab, end_tokens(model, tokenizer))
    return TargetSignals(model, taps, ids)


def _training_run(
    run_folder: RunFolder, head: Head, signals: TargetSignals, texts: Corpus, budget: Budget
) -> TrainingRun:
    """Set up a run that trains this head, or continues from the checkpoint if there is one."""
    config = run_folder.config
    if not len(trained_positions(texts.train, config.depth)):
        raise ValueError(
            f"{config.target_name} answered nothing in {len(texts.train)} texts of {texts.train.tokens.shape[1]} "
            "tokens: there is nothing to learn from. Give more --minutes or a longer --length"
        )
    trainer = HeadTrainer(head, signals.rows, config.schedule)
    began, history = budget.spent, list[dict[str, object]]()
    if run_folder.checkpoint.exists():
        state = trainer.restore(run_folder.checkpoint)
        began, history = state["began"], state["history"]
    length = texts.train.tokens.shape[1]
    needed = step_bytes(trainer.head.shape, config.schedule, length) + signals.bytes_needed(config.batch * length)
    cache = SignalCache(signals, texts.train, cache_limit(trainer.device, needed))
    return TrainingRun(trainer, cache, budget, run_folder, began, history)


def _figures(config: TrainConfig, budget: Budget, texts: Corpus, run: TrainingRun, start: InitialHead) -> Figures:
    # a resumed run may ask for fewer minutes than were spent already; the command names those that it took
    used = replace(config, minutes=max(config.minutes, round(budget.spent / 60, 1)))
    names = {"target": config.target_name, "out": config.out.name, "start": config.start and config.start.name}
    return {
        "command": used.command,
        "plan": {**config.as_json(), **names, "prompts": None},
        "origin": start.provenance,
        "versions": reports.versions(),
        "texts": len(texts.train),
        "tokens": texts.tokens,
        "steps": run.trainer.steps,
        "epochs": run.trainer.steps * run.trainer.schedule.batch / len(texts.train),
        "seconds": {"data": run.began, "training": budget.spent - run.began},
        "step_ms": reports.step_ms(run.history),
        "texts_remembered": run.signals.cached_texts,
        "history": run.history,
    }


def _save_head(
    config: TrainConfig, figures: Figures, trainer: HeadTrainer, signals: TargetSignals, model: PreTrainedModel
) -> None:
    """Save the averaged head and the figures known so far."""
    training = {name: value for name, value in figures.items() if name != "history"}
    ids = tuple(signals.ids.tolist())
    meta = meta_for(model, ids, target=config.target_name, training=training, licence=config.licence)
    save(config.out, trainer.average, meta)
    _save_figures(config, figures)


def _save_figures(config: TrainConfig, figures: Figures) -> None:
    path: Path = config.out / "figures.json"
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _time_limits(config: TrainConfig) -> tuple[float, float]:
    """Return the most seconds of the evaluation, and the share of the time for generating texts."""
    if not _on_gpu(config):
        return CPU_EVALUATION if config.counts else CPU_HELD_OUT, config.data or DATA_SHARE
    default = GPU_CONTINUED_DATA_SHARE if config.start else GPU_DATA_SHARE
    return GPU_EVALUATION if config.counts else GPU_HELD_OUT, config.data or default


def _device(config: TrainConfig) -> torch.device:
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _on_gpu(config: TrainConfig) -> bool:
    return _device(config).type == "cuda"
