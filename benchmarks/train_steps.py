"""Profile the parts of a training on this machine: target passes, batches and steps, over random texts.

    PYTHONPATH=src python3 benchmarks/train_steps.py --target FOLDER [--steps 20] [--depth 5] [--vocab 8192]

The time does not depend on the texts. Prints the milliseconds of each part, and its most expensive operations.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from draftproof.engine.load import load
from draftproof.models.attention import steady_attention
from draftproof.models.compatibility import head_size
from draftproof.models.head.taps import shape_for
from draftproof.train.chat_template import turns_of
from draftproof.train.config import DEFAULT_VOCAB, TrainingSchedule
from draftproof.train.data import rows_per_wave, text_starts
from draftproof.train.generate import Texts, generate_texts
from draftproof.train.target import SignalCache, TargetSignals
from draftproof.train.trainer import HeadTrainer, RunningMetrics, new_head

WARM_UP_STEPS = 3
BATCHES = 4
OPERATIONS = 25
FIRST_POSITIONS = 48
"""Positions of the generated texts: short texts show the cost of a token apart from its attention."""


def synced_time() -> float:
    """Return the time after all work on the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def profiled(name: str, step: Callable[[int], object], count: int, warm_up: int = WARM_UP_STEPS) -> None:
    """Print the time of a step, then its operations, in separate runs: a profiler takes time itself."""
    for n in range(warm_up):
        step(n)
    began = synced_time()
    for n in range(count):
        step(n)
    print(f"\n== {name}: {1000 * (synced_time() - began) / count:.2f} ms", flush=True)
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        step(0)
        synced_time()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=OPERATIONS, max_name_column_width=48), flush=True)


def steps(model: PreTrainedModel, schedule: TrainingSchedule, length: int, vocab: int, count: int) -> None:
    """Profile a pass of the target, a batch from cached states, and the two kinds of training steps."""
    numbers = torch.Generator().manual_seed(0)
    texts = BATCHES * schedule.batch
    tokens = torch.randint(head_size(model), (texts, length), dtype=torch.int32, generator=numbers)
    some = Texts(tokens, torch.rand(texts, length, generator=numbers) < 0.75)
    signals = TargetSignals(model, shape_for(model).taps, torch.arange(min(vocab, head_size(model))))
    print(f"states give the logits: {signals.states_give_logits}")
    trainer = HeadTrainer(new_head(model, 0).to(model.device), signals.rows, schedule)
    metrics = RunningMetrics.zeros(schedule.depth, model.device)
    cache = SignalCache(signals, some, 8 << 30)
    rows = torch.arange(texts).split(schedule.batch)
    for part in rows:
        cache.batch(part, schedule.depth)
    profiled("a pass of the target", lambda n: signals.states(some.select(rows[n % BATCHES])), count)
    profiled("a batch from cached states", lambda n: cache.batch(rows[n % BATCHES], schedule.depth), count)
    for name, progress in (("a single step", 0.0), ("an unrolled step", 1.0)):
        profiled(
            name,
            lambda n, p=progress: trainer.train_step(cache.batch(rows[n % BATCHES], schedule.depth), p, metrics),
            count,
        )


def data(model: PreTrainedModel, tokenizer: Any, length: int) -> None:
    """Profile the first positions of a wave of as many texts as a training would generate at once."""
    turns, rows = turns_of(tokenizer), rows_per_wave(model, length)
    starts = text_starts(turns, tokenizer, rows, random.Random(0))
    generator = torch.Generator(model.device).manual_seed(0)

    def wave(n: int) -> None:
        generate_texts(model, turns, starts, length, generator, go_on=lambda position: position < FIRST_POSITIONS)

    profiled(f"{FIRST_POSITIONS} positions of {rows} texts", wave, 1, warm_up=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=642)
    parser.add_argument("--vocab", type=int, default=DEFAULT_VOCAB)
    parser.add_argument("--data", action="store_true", help="profile the generation of texts too")
    options = parser.parse_args()
    schedule = TrainingSchedule(options.depth, options.batch)
    engine = load(options.target, None, device=options.device, pack=False)
    with steady_attention(engine.hf.device):
        steps(engine.hf, schedule, options.length, options.vocab, options.steps)
        if options.data:
            data(engine.hf, engine.tokenizer, options.length)


if __name__ == "__main__":
    main()
