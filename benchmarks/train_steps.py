"""Where the time of a training goes on this machine: its passes and steps, each for itself, over made-up texts.

    PYTHONPATH=src python3 benchmarks/train_steps.py --target FOLDER [--steps 20] [--depth 5] [--vocab 8192]

What is in the texts does not matter to the time. Prints milliseconds for each kind of step, and its largest operations.
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
from draftproof.train.config import DEFAULT_VOCAB, Course
from draftproof.train.data import rows_at_once, starts
from draftproof.train.generate import Texts, converse
from draftproof.train.target import Notes, TargetSignals
from draftproof.train.trainer import Marks, Student, new_head

WARMING_UP = 3
BATCHES = 4
OPERATIONS = 25
FIRST_POSITIONS = 48
"""Of the data: short texts show what a token costs besides its attention."""


def waited() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def shown(name: str, step: Callable[[int], object], count: int, warming_up: int = WARMING_UP) -> None:
    """Its time, then its operations: a profiler takes time itself."""
    for n in range(warming_up):
        step(n)
    began = waited()
    for n in range(count):
        step(n)
    print(f"\n== {name}: {1000 * (waited() - began) / count:.2f} ms", flush=True)
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        step(0)
        waited()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=OPERATIONS, max_name_column_width=48), flush=True)


def steps(model: PreTrainedModel, course: Course, length: int, vocab: int, count: int) -> None:
    """A pass of the teacher, a lesson out of its notes, and the two kinds of steps."""
    numbers = torch.Generator().manual_seed(0)
    texts = BATCHES * course.batch
    tokens = torch.randint(head_size(model), (texts, length), dtype=torch.int32, generator=numbers)
    some = Texts(tokens, torch.rand(texts, length, generator=numbers) < 0.75)
    teacher = TargetSignals(model, shape_for(model).taps, torch.arange(min(vocab, head_size(model))))
    print(f"states tell the distribution: {teacher.tells}")
    student = Student(new_head(model, 0).to(model.device), teacher.rows, course)
    marks = Marks.none(course.depth, model.device)
    notes = Notes(teacher, some, 8 << 30)
    rows = torch.arange(texts).split(course.batch)
    for part in rows:
        notes.lesson(part, course.depth)
    shown("a pass of the teacher", lambda n: teacher.taught(some.of(rows[n % BATCHES])), count)
    shown("a lesson out of the notes", lambda n: notes.lesson(rows[n % BATCHES], course.depth), count)
    for name, progress in (("a single step", 0.0), ("an unrolled step", 1.0)):
        shown(name, lambda n, p=progress: student.learn(notes.lesson(rows[n % BATCHES], course.depth), p, marks), count)


def data(model: PreTrainedModel, tokenizer: Any, length: int) -> None:
    """The first positions of a wave, of as many texts as the training would make at once."""
    turns, rows = turns_of(tokenizer), rows_at_once(model, length)
    begun = starts(turns, tokenizer, rows, random.Random(0))
    generator = torch.Generator(model.device).manual_seed(0)

    def wave(n: int) -> None:
        converse(model, turns, begun, length, generator, go_on=lambda position: position < FIRST_POSITIONS)

    shown(f"{FIRST_POSITIONS} positions of {rows} texts", wave, 1, warming_up=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=642)
    parser.add_argument("--vocab", type=int, default=DEFAULT_VOCAB)
    parser.add_argument("--data", action="store_true", help="the making of texts as well")
    options = parser.parse_args()
    course = Course(options.depth, options.batch)
    engine = load(options.target, None, device=options.device, pack=False)
    with steady_attention(engine.hf.device):
        steps(engine.hf, course, options.length, options.vocab, options.steps)
        if options.data:
            data(engine.hf, engine.tokenizer, options.length)


if __name__ == "__main__":
    main()
