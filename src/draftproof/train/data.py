"""Make the training texts: the target generates them in waves, and each wave is saved as soon as it is complete."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.models.compatibility import decoder_config, head_size, max_positions
from draftproof.models.head.taps import shape_for
from draftproof.train.chat_template import Turns, turns_of
from draftproof.train.config import Budget, RunFolder
from draftproof.train.generate import Start, Texts, generate_texts

MIN_TEXT_TOKENS: Final = 24
"""Tokens that a text has at least, even if time is up: a shorter one has nothing to learn from."""

CPU_ROWS: Final = 32
"""Texts of a wave on a CPU."""

KV_MEMORY_SHARE: Final = 0.55
"""Share of a GPU's free memory for the keys and values of a wave."""

WAVES_PER_SEED: Final = 100_003
"""Waves numbered within one seed: runs with neighbouring seeds have no text in common."""

HELD_OUT_EVERY: Final = 32
"""One text in this many is held out for the evaluation."""

ReportStage = Callable[[str, float], None]
"""Receives the name of the current stage and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts of a run, split into training and held-out texts."""

    train: Texts
    held_out: Texts

    @property
    def tokens(self) -> int:
        return self.train.tokens.numel()


def make_corpus(
    run_folder: RunFolder, model: PreTrainedModel, tokenizer: Any, budget: Budget, report: ReportStage
) -> Corpus:
    """Load the texts in the folder, and generate more while the budget for data lasts."""
    config, last_wave_seconds = run_folder.config, 0.0
    length = min(config.length, max_positions(decoder_config(model)) or config.length)
    rows = rows_per_wave(model, length)
    while not (files := _files(run_folder.folder)) or _may_grow(run_folder, budget, last_wave_seconds):
        before = budget.spent
        run_folder.save_spent(before)
        wave = _wave(model, tokenizer, rows, length, config.seed * WAVES_PER_SEED + len(files), budget, report)
        if files and wave.tokens.shape[1] < load_texts(run_folder.folder).tokens.shape[1]:
            break  # cut short by the clock; all texts of a run must have one length
        _save(run_folder.folder / f"texts-{len(files):03}.safetensors", wave)
        length, last_wave_seconds = wave.tokens.shape[1], budget.spent - before
        run_folder.save_spent(budget.spent)
        budget.check_pause()
    return _split(load_texts(run_folder.folder))


def load_texts(folder: Path) -> Texts:
    """Load the texts of all waves in the folder."""
    parts = [load_file(path) for path in _files(folder)]
    return Texts(torch.cat([part["tokens"] for part in parts]), torch.cat([part["spoken"] for part in parts]).bool())


def rows_per_wave(model: PreTrainedModel, length: int) -> int:
    """Return how many texts are generated at once: as many as fit into a GPU's memory."""
    if model.device.type != "cuda":
        return CPU_ROWS
    shape, config = shape_for(model), decoder_config(model)
    kv_bytes = 2 * config.num_hidden_layers * shape.kv_heads * shape.head_dim * length * model.dtype.itemsize
    sampling_bytes = 5 * 4 * head_size(model)  # sampling holds a few float32 copies of the logits
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(32, int(KV_MEMORY_SHARE * free / (kv_bytes + sampling_bytes)) // 32 * 32)


def frequent_tokens(texts: Texts, size: int, count: int, always: Sequence[int]) -> Int[Tensor, " R"]:
    """Return the `count` most frequent tokens of the answers, most frequent first, with those of `always` in front."""
    if not 1 <= count <= size:
        raise ValueError(f"vocab={count}: the target has {size} tokens; give 1 to {size}")
    counts = torch.bincount(texts.tokens[texts.is_answer].long(), minlength=size)
    counts[torch.tensor(sorted(set(always)), dtype=torch.long)] += int(counts.sum()) + 1
    return counts.argsort(descending=True, stable=True)[:count]


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return every token that ends a text."""
    eos = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _may_grow(run_folder: RunFolder, budget: Budget, wave_seconds: float) -> bool:
    """Return whether there is time for another wave.

    Once training has begun the texts are fixed, because the head's vocabulary is counted from them.
    """
    return not run_folder.checkpoint.exists() and budget.left_until(budget.data_ends) > wave_seconds


def _wave(
    model: PreTrainedModel, tokenizer: Any, rows: int, length: int, seed: int, budget: Budget, report: ReportStage
) -> Texts:
    turns = turns_of(tokenizer)
    starts = text_starts(turns, tokenizer, rows, random.Random(seed))

    def go_on(position: int) -> bool:
        report("data", min(1.0, budget.spent / budget.data_ends))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # without it the clock would measure launches, not work
        return position < MIN_TEXT_TOKENS or budget.left_until(budget.data_ends) > 0

    generator = torch.Generator(model.device).manual_seed(seed)
    return generate_texts(model, turns, starts, length, generator, ends=end_tokens(model, tokenizer), go_on=go_on)


def _split(texts: Texts) -> Corpus:
    """Hold out every n-th row, so that both parts have texts of every wave."""
    held_out = torch.arange(len(texts)) % HELD_OUT_EVERY == 0
    return Corpus(
        Texts(texts.tokens[~held_out], texts.is_answer[~held_out]),
        Texts(texts.tokens[held_out], texts.is_answer[held_out]),
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("texts-*.safetensors"))


def _save(path: Path, texts: Texts) -> None:
    """Save under a temporary name first: a killed run leaves a complete file or none."""
    unfinished = path.with_suffix(".part")
    save_file({"tokens": texts.tokens.contiguous(), "spoken": texts.is_answer.to(torch.uint8).contiguous()}, unfinished)
    unfinished.rename(path)


TEMPERATURES: Final = ((1.0, 0.55), (0.7, 0.28), (0.0, 0.17))
"""Temperatures of the answers and their shares: a head must follow the texts of every kind of sampling."""

EMPTY_SHARE: Final = 0.2
"""Share of conversations that begin without any words: the target generates the whole question."""

COMPLETE_SHARE: Final = 0.35
"""Share of the other conversations that begin with a complete question."""

UNFINISHED: Final = "def"
"""Ending of a complete question that still needs code: the target has to write that first."""


def text_starts(turns: Turns, tokenizer: Any, rows: int, rng: random.Random) -> list[Start]:
    """Draw the beginnings of this many texts."""
    return [_start(turns, tokenizer, rng) for _ in range(rows)]


def all_subjects() -> Sequence[str]:
    """Return every subject that a question can be about."""
    return [subject for kind in QUESTION_KINDS for subject in kind.subjects]


def _start(turns: Turns, tokenizer: Any, rng: random.Random) -> Start:
    values, shares = zip(*TEMPERATURES, strict=True)
    [temperature] = rng.choices(values, shares)
    text, complete = ("", False) if rng.random() < EMPTY_SHARE else _question(rng)
    question = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
    tokens = turns.opening + question
    if not turns.is_chat:
        return Start(tokens or (int(_first_token(tokenizer)),), True, temperature)
    return Start(tokens + turns.to_assistant, True, temperature) if complete else Start(tokens, False, temperature)


def _question(rng: random.Random) -> tuple[str, bool]:
    """Draw the beginning of a question; the flag says whether it is the complete question."""
    kind = rng.choice(QUESTION_KINDS)
    complete = rng.random() < COMPLETE_SHARE
    text = rng.choice(kind.complete if complete else kind.beginnings).format(rng.choice(kind.subjects))
    return text, complete and not text.endswith(UNFINISHED)


def _first_token(tokenizer: Any) -> int:
    """Return a first token for a tokenizer that has no opening tokens."""
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in special if token is not None), 0)


SUBJECTS: Final = (
    "photosynthesis", "volcanoes", "the French Revolution", "black holes", "vaccination", "inflation", "earthquakes",
    "neural networks", "the human heart", "electric cars", "the Roman Empire", "supply and demand", "DNA", "gravity",
    "ocean currents", "climate change", "chess", "jazz", "Impressionist painting", "the printing press", "antibiotics",
    "solar panels", "compound interest", "the water cycle", "democracy", "plate tectonics", "dreams", "meditation",
    "machine learning", "blockchain", "the Cold War", "ancient Egypt", "Shakespeare", "dinosaurs", "the immune system",
    "quantum mechanics", "public speaking", "yoga", "recycling", "coral reefs", "the stock market", "typography",
    "coffee", "cheese making", "sailing", "marathon training", "beekeeping", "watercolours", "the violin", "origami",
    "user interfaces", "remote work", "job interviews", "time management", "negotiation", "nutrition", "sleep",
    "small businesses", "marketing", "insurance", "renting a flat", "learning Spanish", "camping", "photography",
)  # fmt: skip

STORY_SUBJECTS: Final = (
    "a dragon who is afraid of fire", "two sisters and a magic mirror", "a robot that learns to paint", "a lost puppy",
    "a detective in a sleepy town", "the last tree on earth", "a boy who talks to the moon", "a pirate without a ship",
    "an astronaut who comes home after a hundred years", "a baker with a secret", "a haunted violin", "a talking fox",
)  # fmt: skip

MATH_PROBLEMS: Final = (
    "the sum of the first n odd numbers", "the area of a triangle", "a quadratic equation",
    "the greatest common divisor",
    "the probability of rolling two sixes", "the derivative of a polynomial", "a system of two linear equations",
    "the volume of a cylinder", "simple interest", "the mean and the median", "percentages", "ratios", "prime factors",
)  # fmt: skip

PROGRAMMING_TASKS: Final = (
    "reverses a string", "finds the largest number in a list", "checks whether a word is a palindrome", "sorts a list",
    "reads a CSV file", "computes Fibonacci numbers", "removes duplicates from a list", "counts the words in a text",
    "implements a stack", "merges two dictionaries", "validates an email address", "parses a date", "draws a histogram",
    "converts Celsius to Fahrenheit", "implements binary search", "flattens a nested list", "downloads a web page",
)  # fmt: skip

SENTENCES: Final = (
    "hey, cant come to the meeting today, something came up", "The results was not what we had expected to seen.",
    "Our product is very good and very cheap and everyone should really buy it.",
    "In view of the aforementioned circumstances, we regret to be unable to comply with your request.",
    "The dog ran through the park because it had seen a squirrel.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """Templates of one kind of question. `{}` stands for a subject; the target continues an unfinished beginning."""

    complete: tuple[str, ...]
    beginnings: tuple[str, ...]
    subjects: tuple[str, ...] = SUBJECTS


QUESTION_KINDS: Final = (
    QuestionKind(
        ("Explain {} in simple terms.", "What is {}?", "What should everybody know about {}?", "Tell me about {}."),
        ("Explain", "Why does", "How do", "What is the difference between", "Can you explain how {}", "What are"),
    ),
    QuestionKind(
        ("Write a short story about {}.", "Tell me a bedtime story about {}.", "Write a scene with {}."),
        ("Write a story about", "Continue this story: Once upon a time,", "Write a poem about", "Once upon a time"),
        STORY_SUBJECTS,
    ),
    QuestionKind(
        ("Rewrite this more politely: {}", "Correct the grammar: {}", "Make this sentence shorter: {}"),
        ("Rewrite the following text so that it sounds more formal:", "Summarize this text:", "Edit this paragraph:"),
        SENTENCES,
    ),
    QuestionKind(
        ("I would like to learn more about {}. Where should I begin?", "What do you think about {}?"),
        ("Hi!", "I feel", "Should I", "Help me", "I am planning", "My friend", "Can you help me with {}", "Imagine"),
    ),
    QuestionKind(
        ("Explain {} with an example.", "How do I calculate {}? Show every step."),
        ("Solve:", "If a train", "Calculate", "A farmer has", "What is the value of", "Prove that", "Find x if"),
        MATH_PROBLEMS,
    ),
    QuestionKind(
        ("Here is a Python function that {}. Add type hints and a docstring:\n\n```python\ndef",),
        (
            "Fix the bug in this code:\n\n```python\ndef", "Refactor this function:\n\n```python\n",
            "Add comments to this code:\n\n```javascript\nfunction",
            "Rename the variables in this code:\n\n```python\n",
        ),
        PROGRAMMING_TASKS,
    ),
    QuestionKind(
        ("Write a Python function that {}.", "Write a JavaScript function that {}.", "Write a program that {}."),
        ("Write a Python function", "Write a SQL query", "How do I", "Create an HTML page", "Implement a class"),
        PROGRAMMING_TASKS,
    ),
    QuestionKind(
        ("List ten facts about {}.", "Give me five tips on {}.", "What are the pros and cons of {}?"),
        ("List", "Give me ten ideas for", "Make a table of", "Name five", "Create a checklist for", "Suggest some"),
    ),
)  # fmt: skip
