"""How the conversations begin that a target has with itself: beginnings of questions, and what they are about.

The target writes the rest of a question and then the answer. None of the subjects occurs in the held-out prompts
(held_out.jsonl); a test holds that.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftproof.train.lockstep import Start
from draftproof.train.turns import Turns

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
