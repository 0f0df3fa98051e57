"""The examples of docs/writing-a-drafter.md run, conform and are exact."""

import re
from pathlib import Path

import pytest
import torch

from drafters.toy_rounds import exact_distribution, p_value, rng_of, row, speak
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.interface import Drafter
from draftproof.models.toy import Toy

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-drafter.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def example(name: str) -> type:
    names: dict[str, type] = {}
    code = next(block for block in BLOCKS if f"class {name}" in block)
    exec(code, names)
    return names[name]


def drafters() -> dict[str, Drafter]:
    return {
        "Phrases": example("Phrases")([[0, 1, 2, 3], [2, 3, 3], [3, 1]]),
        "Favourites": example("Favourites")(torch.tensor([0.4, 0.3, 0.2, 0.1])),
    }


def test_the_first_example_is_a_drafter_of_twenty_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20
    assert isinstance(drafters()["Phrases"], Drafter)


def test_phrases_completes_what_the_text_has_begun():
    rows = [row(0, [9, 0, 1]), row(1, [5]), row(2, [9, 2])]
    draft = drafters()["Phrases"].propose(rows, [4, 4, 1], rng_of(rows))
    assert draft.tokens.tolist() == [[2, 3], [-1, -1], [3, -1]]
    assert draft.lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["Phrases", "Favourites"])
def test_an_example_asked_for_nothing_gives_nothing(name):
    rows = [row(0, [0, 1]), row(1, [2])]
    assert drafters()[name].propose(rows, [0, 0], rng_of(rows)).tokens.shape == (2, 0)


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block", "coupled", "tree"])
@pytest.mark.parametrize("name", ["Phrases", "Favourites"])
def test_the_examples_give_the_distribution_of_the_target(name, rule):
    """α = 1e-6, fixed seed; the controls that must fail are in test_drafter_exactness.py."""
    target, prompt, sampling = Toy.random(4, order=2, seed=8), [3, 2, 0, 1], SamplingParams(temperature=0.8, top_k=3)
    rows = [row(i, prompt, sampling) for i in range(2000)]
    texts = speak(target, drafters()[name], rule, rows, slots=3, length=3)
    assert p_value(exact_distribution(target, prompt, sampling, 3), texts, 4) > 1e-6
