"""Train a head until its time is over: optimiser steps, progress reports, checkpoints, and the head it starts from."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from draftproof.models.bundled.download import sha256
from draftproof.models.compatibility import decoder_config
from draftproof.models.head.export import check_exportable, exportable_taps
from draftproof.models.head.file import WEIGHTS, HeadMeta, check_target, load
from draftproof.models.head.network import Head, HeadShape
from draftproof.models.head.taps import shape_for
from draftproof.train.config import Budget, RunFolder, TrainConfig, TrainingSchedule
from draftproof.train.loss import head_loss
from draftproof.train.target import SignalCache, TrainingBatch
from draftproof.train.unroll import unroll

ACCEPTANCE_BLEND: Final = 0.4
"""Share of -log acceptance in the loss of unrolled steps; the rest is cross-entropy."""

STEP_DECAY: Final = 0.8
"""Factor of the loss per further step of a draft: a token counts only if all before it are accepted."""

WARMUP_STEPS: Final = 100
"""Steps until the full learning rate."""

LEAST_RATE: Final = 0.02
"""Share of the learning rate that is left at the end."""

MAX_AVERAGE_DECAY: Final = 0.999
"""Share of itself that the moving average of the weights keeps at a step, after the first steps."""

REPORT_STEPS: Final = 64
REPORT_SECONDS: Final = 5.0
"""Steps between two reads of the metrics, each of which syncs with the GPU; seconds, if steps are long."""

CHECKPOINT_SECONDS: Final = 60.0
"""Seconds between two checkpoints: the most that a killed run loses."""

FINAL_NORMS: Final = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""Attribute names that model families use for the norm before their output rows."""


@dataclass(slots=True)
class RunningMetrics:
    """Sums of the loss and the acceptance over batches, kept on the device so that adding to them needs no sync."""

    loss: Tensor
    overlap: Tensor
    steps: Tensor
    batches: int = 0

    @classmethod
    def zeros(cls, depth: int, device: torch.device) -> "RunningMetrics":
        return cls(torch.zeros((), device=device), torch.zeros(depth, device=device), torch.zeros(depth, device=device))

    def add(self, loss: Tensor, overlaps: list[Tensor]) -> None:
        self.loss += loss.detach()
        self.batches += 1
        self.overlap[: len(overlaps)] += torch.stack([overlap.mean() for overlap in overlaps])
        self.steps[: len(overlaps)] += 1

    def read(self) -> tuple[float, list[float]]:
        """Return the mean loss, and the mean acceptance of each trained step of the draft."""
        trained = [step for step, count in enumerate(self.steps.tolist()) if count]
        accepted = (self.overlap / self.steps.clamp(min=1)).tolist()
        return float(self.loss) / max(1, self.batches), [accepted[step] for step in trained]


@dataclass(slots=True)
class HeadTrainer:
    """A head in training, with its optimiser. Weights are float32; on a GPU, products are computed in bfloat16.

    `average` is the head with an exponential moving average of the weights, which drafts better than the latest ones.
    """

    head: Head
    rows: Float[Tensor, "R H"]
    schedule: TrainingSchedule
    steps: int = 0
    optimizer: torch.optim.AdamW = field(init=False)
    average: Head = field(init=False)

    def __post_init__(self) -> None:
        self.head.train()
        self.average = copy.deepcopy(self.head).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self.schedule.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=self.device.type == "cuda",
        )

    @property
    def device(self) -> torch.device:
        return self.head.norm.weight.device

    def train_step(self, batch: TrainingBatch, progress: float, metrics: RunningMetrics) -> None:
        """Take one optimiser step. `progress` is the share of the training that is over."""
        single = progress < self.schedule.single_step_share
        depth, blend = (1, 0.0) if single else (self.schedule.depth, ACCEPTANCE_BLEND)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * learning_rate_factor(self.steps, progress)
        outs = self.draft_outputs(batch, depth, self.head)
        results = [head_loss(out, self.rows, batch.scores, batch.lse, blend) for out in outs]
        losses, overlaps = zip(*results, strict=True)
        weights = [STEP_DECAY**step for step in range(depth)]
        loss = sum(weight * one for weight, one in zip(weights, losses, strict=True)) / sum(weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        update_average = get_ema_multi_avg_fn(average_decay(self.steps))
        update_average(tuple(self.average.parameters()), tuple(self.head.parameters()), self.steps)
        self.steps += 1
        metrics.add(loss, list(overlaps))

    def draft_outputs(self, batch: TrainingBatch, depth: int, head: Head) -> list[Float[Tensor, "M H"]]:
        """Return the head's output states at the trained positions, for each step of a draft."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            outs = unroll(head, batch.embedded, batch.states, depth)
        return [out.flatten(0, 1).index_select(0, batch.at).float() for out in outs]

    def save(self, path: Path, **more: Any) -> None:
        """Write a checkpoint, under a temporary name first: a killed run keeps the previous one."""
        unfinished = path.with_suffix(".part")
        parts: dict[str, Any] = {"head": self.head, "average": self.average, "optimizer": self.optimizer}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "steps": self.steps, **more}, unfinished)
        unfinished.rename(path)

    def restore(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint and return the extra values that were saved with it."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        self.head.load_state_dict(state.pop("head"))
        self.average.load_state_dict(state.pop("average"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.steps = state.pop("steps")
        return state


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress report: `accepted` is the acceptance at each trained step of the draft, `step_ms` the recent time."""

    share: float
    steps: int
    loss: float
    accepted: list[float]
    step_ms: float


@dataclass(slots=True)
class TrainingRun:
    """A trainer with its batches, budget and folder. `began` is what the budget had spent when training began."""

    trainer: HeadTrainer
    signals: SignalCache
    budget: Budget
    run_folder: RunFolder
    began: float
    history: list[dict[str, object]]

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train until the evaluation is due."""
        if self.share >= 1:
            return
        metrics, saved = self._new_metrics(), self.budget.spent
        reported = before = saved
        for batch in self._batches():
            self.trainer.train_step(batch, self.share, metrics)
            now = self.budget.spent
            last = self.budget.left_until(self.budget.training_ends) < now - before
            before = now
            if last or self.trainer.steps % REPORT_STEPS == 0 or now - reported > REPORT_SECONDS:
                reported = self._report(metrics, reported, report)
                metrics = self._new_metrics()
                if now - saved > CHECKPOINT_SECONDS:
                    saved = self.save()
                self._check_pause()
            if last:
                break
        self.save()

    @property
    def share(self) -> float:
        """Return the share of the training time that is over."""
        return min(1.0, (self.budget.spent - self.began) / max(1e-9, self.budget.training_ends - self.began))

    def save(self) -> float:
        """Write a checkpoint and return the seconds spent by then."""
        spent = self.budget.spent
        self.trainer.save(self.run_folder.checkpoint, began=self.began, history=self.history)
        self.run_folder.save_spent(spent)
        return spent

    def _new_metrics(self) -> RunningMetrics:
        return RunningMetrics.zeros(self.trainer.schedule.depth, self.trainer.device)

    def _report(self, metrics: RunningMetrics, reported: float, report: Callable[[Progress], None]) -> float:
        """Report the progress since the last report, and return the seconds spent by then.

        Reading the metrics syncs with the GPU, so the time read after it covers the work and not only its launches.
        """
        loss, accepted = metrics.read()
        spent = self.budget.spent
        step_ms = 1000 * (spent - reported) / metrics.batches
        now = Progress(self.share, self.trainer.steps, loss, accepted, step_ms)
        self.history.append({"steps": now.steps, "loss": loss, "accepted": accepted, "step_ms": round(step_ms, 2)})
        report(now)
        return spent

    def _check_pause(self) -> None:
        try:
            self.budget.check_pause()
        except Exception:
            self.save()
            raise

    def _batches(self) -> Iterator[TrainingBatch]:
        schedule = self.trainer.schedule
        size = min(schedule.batch, self.signals.texts)
        for rows in batch_rows(self.signals.texts, size, schedule.seed, self.trainer.steps):
            batch = self.signals.batch(rows, schedule.depth)
            if len(batch.at):
                yield batch


def batch_rows(texts: int, batch: int, seed: int, first: int) -> Iterator[Int[Tensor, " n"]]:
    """Yield the text indices of every batch from number `first` on, without end; each epoch has its own order."""
    in_epoch = texts // batch
    epoch, at = divmod(first, in_epoch)
    while True:
        order = _epoch_order(texts, seed, epoch)
        for number in range(at, in_epoch):
            yield order[number * batch : (number + 1) * batch]
        epoch, at = epoch + 1, 0


def _epoch_order(count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))


def learning_rate_factor(steps: int, progress: float) -> float:
    """Return the share of the peak learning rate: linear warm-up by steps, cosine decay by time."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (steps + 1) / WARMUP_STEPS) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def average_decay(steps: int) -> float:
    """Return the moving average's decay at a step: small at first, so that untrained weights leave it quickly."""
    return min(MAX_AVERAGE_DECAY, (1 + steps) / (10 + steps))


def step_bytes(shape: HeadShape, schedule: TrainingSchedule, length: int) -> int:
    """Return an upper estimate of the bytes that autograd keeps in a training step.

    Counts half-precision products, float32 states between them, and attention weights. All steps of a draft count
    alike, and the taps count as two more.
    """
    position_bytes = 64 * shape.hidden + 10 * shape.intermediate + 6 * shape.heads * length
    return schedule.batch * length * (schedule.depth + 2) * position_bytes


@dataclass(frozen=True, slots=True)
class InitialHead:
    """The head that a run starts from.

    `provenance` is saved with the figures, so that a chain of runs can be repeated; None for a new head.
    """

    head: Head
    provenance: dict[str, Any] | None = None


def initial_head(config: TrainConfig, model: PreTrainedModel) -> InitialHead:
    """Return a new head, or the one in `config.start`, in float32 on the CPU; refuse a head of another target."""
    if config.start is None:
        layers = decoder_config(model).num_hidden_layers
        return InitialHead(new_head(model, config.seed, exportable_taps(layers) if config.export else None))
    head, meta = load(config.start)
    check_target(meta, model)
    _check_shape(head, model, config.start)
    if config.export:
        check_exportable(head, meta, str(config.start))
    provenance = _provenance(config.start, meta)
    _check_seed(config, provenance)
    return InitialHead(head.requires_grad_(True), provenance)


def new_head(model: PreTrainedModel, seed: int, taps: tuple[int, ...] | None = None) -> Head:
    """Return an untrained head, with a copy of the target's final norm if the shapes match.

    The output rows are the target's and expect states that went through that norm.
    """
    head = Head(shape_for(model, taps), seed)
    inner = model.base_model
    norm = next((getattr(inner, name) for name in FINAL_NORMS if hasattr(inner, name)), None)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == head.norm.weight.shape:
        with torch.no_grad():
            head.norm.weight.copy_(weight)
    return head


def _provenance(start: Path, meta: HeadMeta) -> dict[str, Any]:
    """Return a head's name, the sha256 of its weights, and how it was trained, including its own provenance."""
    training = {
        name: meta.training.get(name) for name in ("command", "versions", "texts", "steps", "seconds", "origin")
    }
    training["seed"] = meta.training.get("plan", {}).get("seed")
    identity = {"name": start.resolve().name, "sha256": sha256(start / WEIGHTS), "vocab": len(meta.ids)}
    return identity | {name: value for name, value in training.items() if value is not None}


def _check_shape(head: Head, model: PreTrainedModel, start: Path) -> None:
    wanted = shape_for(model, head.shape.taps)
    if head.shape != wanted:
        raise ValueError(f"{start} holds a head of shape {head.shape}, but this target's heads have shape {wanted}")


def _check_seed(config: TrainConfig, provenance: dict[str, Any]) -> None:
    """Refuse a seed that the head or one it continues was trained with: the seed determines the texts."""
    before: dict[str, Any] | None = provenance
    while before:
        if before.get("seed") == config.seed:
            raise ValueError(
                f"seed={config.seed} made the texts that {before['name']} was trained on, and would make them again: "
                "give another --seed"
            )
        before = before.get("origin")
