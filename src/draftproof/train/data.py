"""The texts that a head learns from: made by the target in waves, each kept in a file as soon as it is there."""

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

from draftproof.models.compatibility import decoder_config, furthest, head_size
from draftproof.models.head.taps import shape_for
from draftproof.train.chat_template import Turns, turns_of
from draftproof.train.config import Budget, Workplace
from draftproof.train.generate import Start, Texts, converse

TEMPERATURES: Final = ((1.0, 0.55), (0.7, 0.28), (0.0, 0.17))
"""Of the answers, with their shares: a head should know the roads that every kind of sampling takes."""

BARE: Final = 0.2
"""Conversations that begin with nothing: what the target would be asked by itself."""

WHOLE: Final = 0.35
"""Of the rest, those whose question is complete as it stands here."""

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

HEROES: Final = (
    "a dragon who is afraid of fire", "two sisters and a magic mirror", "a robot that learns to paint", "a lost puppy",
    "a detective in a sleepy town", "the last tree on earth", "a boy who talks to the moon", "a pirate without a ship",
    "an astronaut who comes home after a hundred years", "a baker with a secret", "a haunted violin", "a talking fox",
)  # fmt: skip

PROBLEMS: Final = (
    "the sum of the first n odd numbers", "the area of a triangle", "a quadratic equation",
    "the greatest common divisor",
    "the probability of rolling two sixes", "the derivative of a polynomial", "a system of two linear equations",
    "the volume of a cylinder", "simple interest", "the mean and the median", "percentages", "ratios", "prime factors",
)  # fmt: skip

TASKS: Final = (
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
class Kind:
    """Ways to begin a question of one kind. `{}` stands for a subject; the target goes on behind the last word."""

    wholes: tuple[str, ...]
    beginnings: tuple[str, ...]
    subjects: tuple[str, ...] = SUBJECTS


KINDS: Final = (
    Kind(
        ("Explain {} in simple terms.", "What is {}?", "What should everybody know about {}?", "Tell me about {}."),
        ("Explain", "Why does", "How do", "What is the difference between", "Can you explain how {}", "What are"),
    ),
    Kind(
        ("Write a short story about {}.", "Tell me a bedtime story about {}.", "Write a scene with {}."),
        ("Write a story about", "Continue this story: Once upon a time,", "Write a poem about", "Once upon a time"),
        HEROES,
    ),
    Kind(
        ("Rewrite this more politely: {}", "Correct the grammar: {}", "Make this sentence shorter: {}"),
        ("Rewrite the following text so that it sounds more formal:", "Summarize this text:", "Edit this paragraph:"),
        SENTENCES,
    ),
    Kind(
        ("I would like to learn more about {}. Where should I begin?", "What do you think about {}?"),
        ("Hi!", "I feel", "Should I", "Help me", "I am planning", "My friend", "Can you help me with {}", "Imagine"),
    ),
    Kind(
        ("Explain {} with an example.", "How do I calculate {}? Show every step."),
        ("Solve:", "If a train", "Calculate", "A farmer has", "What is the value of", "Prove that", "Find x if"),
        PROBLEMS,
    ),
    Kind(
        ("Here is a Python function that {}. Add type hints and a docstring:\n\n```python\ndef",),
        (
            "Fix the bug in this code:\n\n```python\ndef", "Refactor this function:\n\n```python\n",
            "Add comments to this code:\n\n```javascript\nfunction",
            "Rename the variables in this code:\n\n```python\n",
        ),
        TASKS,
    ),
    Kind(
        ("Write a Python function that {}.", "Write a JavaScript function that {}.", "Write a program that {}."),
        ("Write a Python function", "Write a SQL query", "How do I", "Create an HTML page", "Implement a class"),
        TASKS,
    ),
    Kind(
        ("List ten facts about {}.", "Give me five tips on {}.", "What are the pros and cons of {}?"),
        ("List", "Give me ten ideas for", "Make a table of", "Name five", "Create a checklist for", "Suggest some"),
    ),
)  # fmt: skip

UNFINISHED: Final = "def"
"""A whole question that ends so is not whole: the target has to write the code first."""


def starts(turns: Turns, tokenizer: Any, rows: int, rng: random.Random) -> list[Start]:
    """How so many texts begin."""
    return [_start(turns, tokenizer, rng) for _ in range(rows)]


def _start(turns: Turns, tokenizer: Any, rng: random.Random) -> Start:
    values, shares = zip(*TEMPERATURES, strict=True)
    [temperature] = rng.choices(values, shares)
    text, whole = ("", False) if rng.random() < BARE else _question(rng)
    begun = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
    tokens = turns.opening + begun
    if not turns.is_chat:
        return Start(tokens or (int(_first_token(tokenizer)),), True, temperature)
    return Start(tokens + turns.to_assistant, True, temperature) if whole else Start(tokens, False, temperature)


def _question(rng: random.Random) -> tuple[str, bool]:
    """The beginning of a question, and whether it is all of it."""
    kind = rng.choice(KINDS)
    whole = rng.random() < WHOLE
    text = rng.choice(kind.wholes if whole else kind.beginnings).format(rng.choice(kind.subjects))
    return text, whole and not text.endswith(UNFINISHED)


def _first_token(tokenizer: Any) -> int:
    """What an empty text of a tokenizer without opening tokens begins with."""
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in named if token is not None), 0)


def every_subject() -> Sequence[str]:
    """What the questions are about."""
    return [subject for kind in KINDS for subject in kind.subjects]


SHORTEST: Final = 24
"""Tokens of a text below which there is nothing to learn from."""

CPU_ROWS: Final = 32

GPU_SHARE: Final = 0.55
"""Of the free memory of a GPU, for the keys and values of a wave."""

SEEDS: Final = 100_003
"""Waves that one seed has numbers for: plans with seeds next to each other have no text in common."""

HELD_OUT: Final = 32
"""One text in so many is kept for the evaluation."""

Report = Callable[[str, float], None]
"""What is being done, and how much of it is done."""


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Texts
    held_out: Texts

    @property
    def tokens(self) -> int:
        return self.train.tokens.numel()


def corpus(place: Workplace, model: PreTrainedModel, tokenizer: Any, budget: Budget, report: Report) -> Corpus:
    """The texts that are there, and as many more as the budget for data has time for."""
    plan, took = place.plan, 0.0
    length = min(plan.length, furthest(decoder_config(model)) or plan.length)
    rows = rows_at_once(model, length)
    while not (files := _files(place.folder)) or _may_grow(place, budget, took):
        before = budget.spent
        place.spend(before)
        wave = _wave(model, tokenizer, rows, length, plan.seed * SEEDS + len(files), budget, report)
        if files and wave.tokens.shape[1] < kept(place.folder).tokens.shape[1]:
            break  # cut short by the clock, and texts of one length train together
        _write(place.folder / f"texts-{len(files):03}.safetensors", wave)
        length, took = wave.tokens.shape[1], budget.spent - before
        place.spend(budget.spent)
        budget.check_pause()
    return _split(kept(place.folder))


def _may_grow(place: Workplace, budget: Budget, wave: float) -> bool:
    """Whether there is time for another wave. A student that has begun keeps its texts: they name its vocabulary."""
    return not place.checkpoint.exists() and budget.left_until(budget.data_ends) > wave


def kept(folder: Path) -> Texts:
    """All waves in the folder."""
    parts = [load_file(path) for path in _files(folder)]
    return Texts(torch.cat([part["tokens"] for part in parts]), torch.cat([part["spoken"] for part in parts]).bool())


def rows_at_once(model: PreTrainedModel, length: int) -> int:
    """How many texts a wave has: what a GPU has memory for."""
    if model.device.type != "cuda":
        return CPU_ROWS
    shape, config = shape_for(model), decoder_config(model)
    remembered = 2 * config.num_hidden_layers * shape.kv_heads * shape.head_dim * length * model.dtype.itemsize
    dists = 5 * 4 * head_size(model)  # the draw holds a few float32 copies
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(32, int(GPU_SHARE * free / (remembered + dists)) // 32 * 32)


def frequent(texts: Texts, size: int, count: int, always: Sequence[int]) -> Int[Tensor, " R"]:
    """The `count` most frequent tokens of the answers, the most frequent first; those of `always` whatever they are."""
    if not 1 <= count <= size:
        raise ValueError(f"vocab={count}: the target has {size} tokens; give 1 to {size}")
    counts = torch.bincount(texts.tokens[texts.spoken].long(), minlength=size)
    counts[torch.tensor(sorted(set(always)), dtype=torch.long)] += int(counts.sum()) + 1
    return counts.argsort(descending=True, stable=True)[:count]


def _wave(
    model: PreTrainedModel, tokenizer: Any, rows: int, length: int, seed: int, budget: Budget, report: Report
) -> Texts:
    turns = turns_of(tokenizer)
    begun: list[Start] = starts(turns, tokenizer, rows, random.Random(seed))

    def go_on(position: int) -> bool:
        report("data", min(1.0, budget.spent / budget.data_ends))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # or the clock would tell how fast work is launched
        return position < SHORTEST or budget.left_until(budget.data_ends) > 0

    generator = torch.Generator(model.device).manual_seed(seed)
    return converse(model, turns, begun, length, generator, ends=ends_of(model, tokenizer), go_on=go_on)


def ends_of(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Every token that ends a text."""
    named = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return [] if named is None else [named] if isinstance(named, int) else list(named)


def _split(texts: Texts) -> Corpus:
    """By rows and not by waves: both parts then have texts of every wave."""
    apart = torch.arange(len(texts)) % HELD_OUT == 0
    return Corpus(Texts(texts.tokens[~apart], texts.spoken[~apart]), Texts(texts.tokens[apart], texts.spoken[apart]))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("texts-*.safetensors"))


def _write(path: Path, texts: Texts) -> None:
    """Under another name first: a reader finds all of it or nothing."""
    unfinished = path.with_suffix(".part")
    save_file({"tokens": texts.tokens.contiguous(), "spoken": texts.spoken.to(torch.uint8).contiguous()}, unfinished)
    unfinished.rename(path)
