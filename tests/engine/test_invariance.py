"""A request's text depends on the request alone: not on its row, its batch, padding, or rows that start and finish.

The targets are tables, so that passes of different shapes agree to the last bit and no difference is allowed. Real
caches, where rounding differs, are tested in test_greedy.py and test_coupled.py.
"""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import Suffix
from draftproof.models.toy import Toy
from engine.many_texts import unchecked

V = 8
TARGET = Toy.random(V, order=2, seed=1)
NEAR = Toy(TARGET.table + torch.randn((V, V, V), generator=torch.Generator().manual_seed(2)) * 0.7)

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=4),
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.9, frequency_penalty=0.4),
    SamplingParams(min_p=0.05, logit_bias={2: 1.0}),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.3),
]
SAMPLINGS = [replace(kind, seed=50 + i) for i, kind in enumerate(KINDS)]
NUMBERS = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(V, (n,), generator=NUMBERS).tolist() for n in (9, 1, 30, 4, 17, 2)]
BUDGETS = [12, 20, 1, 7, 16, 2]

DRAFTERS = {
    "ngram": lambda rule: NGram(branches=2 if rule == "tree" else 1),
    "suffix": lambda rule: Suffix(branches=2 if rule == "tree" else 1),
    "prompt-lookup": lambda rule: PromptLookup(),
    "model": lambda rule: ModelDrafter(NEAR, branches=2 if rule == "tree" else 1),
    "none": lambda rule: None,
}
every_pair = [
    pytest.mark.parametrize("drafter", DRAFTERS),
    pytest.mark.parametrize("rule", ["token", "block", "coupled", "tree"]),
]


def texts(drafter, rule, rows, max_batch, length=4):
    """Return the tokens of these requests, by their number."""
    engine = dp.load(TARGET, DRAFTERS[drafter](rule), rule=rule, num_draft_tokens=length, max_batch=max_batch)
    with unchecked():
        outputs = engine.generate(
            [PROMPTS[r] for r in rows], [SAMPLINGS[r] for r in rows], max_tokens=[BUDGETS[r] for r in rows]
        )
    return {r: output.tokens for r, output in zip(rows, outputs, strict=True)}


@every_pair[0]
@every_pair[1]
def test_a_row_does_not_depend_on_its_neighbours(drafter, rule):
    all_rows = range(len(PROMPTS))
    alone = {r: texts(drafter, rule, [r], 1)[r] for r in all_rows}
    assert texts(drafter, rule, [*all_rows], 6) == alone
    assert texts(drafter, rule, [5, 3, 0, 2, 4, 1], 6) == alone, "another order of rows"
    assert texts(drafter, rule, [*all_rows], 2) == alone, "rows that wait until others finish"
    assert [len(alone[r]) for r in all_rows] == BUDGETS


@pytest.mark.parametrize("length", [1, 7, "auto"])
def test_nor_does_it_with_other_draft_lengths(length):
    all_rows = [*range(len(PROMPTS))]
    alone = {r: texts("model", "block", [r], 1, length)[r] for r in all_rows}
    assert texts("model", "block", all_rows, 3, length) == alone


def test_seeds_tell_texts_apart():
    """A request without a seed gets a new one; a request with one always gives the same text."""
    engine = dp.load(TARGET, ModelDrafter(NEAR), max_batch=10)
    assert len({tuple(o.tokens) for o in engine.generate([PROMPTS[0]] * 10, max_tokens=20)}) == 10
    assert len({tuple(o.tokens) for o in engine.generate([PROMPTS[0]] * 10, max_tokens=20, seed=4)}) == 1


def test_an_engine_remembers_nothing_between_requests():
    engine = dp.load(TARGET, ModelDrafter(NEAR), rule="block", num_draft_tokens=4)
    first = engine.generate(PROMPTS[0], SAMPLINGS[0], max_tokens=15).tokens
    engine.generate(PROMPTS, SAMPLINGS, max_tokens=9)
    assert engine.generate(PROMPTS[0], SAMPLINGS[0], max_tokens=15).tokens == first
