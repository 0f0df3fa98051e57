"""Test drafter × rule × sampling end to end through the engine: the joint distribution of three tokens, by G-test.

The target is a two-layer transformers model with its cache and 8 tokens. Its distribution is computed by full passes
over every prefix with transformers' own processors (engine/plain_distribution.py). α = 1e-6 for each test, fixed seeds.

A bias spread evenly over the cells is detected with power 0.9 from a total variation of √(λ/4N) for N texts, with
λ = 225 for the 512 texts of three tokens and 85 if filters leave 64: 0.075 and 0.046 with 10,000 texts. A bias in one
cell is detected earlier. The controls (engine/test_engine_controls.py) are real mistakes and fail with as many texts.
`slow` is the whole grid with 4,000 texts a cell, and every rule with 100,000.
"""

import pytest

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.models.hf import HFModel
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from g_test import g_test

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
LENGTH, BUDGET, SLOTS = 3, 4, 3

WARPS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=1.2),
    "bias": SamplingParams(logit_bias={1: 1.5, 4: -2.0}),
    "greedy": SamplingParams(temperature=0),
    "filters": SamplingParams(temperature=1.3, top_k=6, top_p=0.95, min_p=0.02),
    "all": SamplingParams(
        temperature=1.3,
        top_k=6,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={3: 0.7},
    ),
}

CHAINS = {
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "prompt-lookup": lambda: "prompt-lookup",
    "model": neighbour,
    "model, own temperature": lambda: ModelDrafter(HFModel(neighbour()), temperature=0.5),
    "early-exit": lambda: "early-exit:1",
}
TREES = {
    "ngram": lambda: NGram(3, branches=3, least=0.01),
    "suffix": lambda: Suffix(branches=2, least=0.01),
    "model": lambda: neighbour(),
    "early-exit": lambda: "early-exit:1",
    "a chain": lambda: "prompt-lookup",
}
PAIRS = [
    *((name, rule, make) for name, make in CHAINS.items() for rule in ("token", "block", "coupled")),
    *((name, "tree", make) for name, make in TREES.items()),
]
every_pair = pytest.mark.parametrize(("rule", "make"), [p[1:] for p in PAIRS], ids=[f"{r}-{n}" for n, r, _ in PAIRS])
one_rule_a_drafter = pytest.mark.parametrize(
    ("rule", "make"),
    budgeted(
        [p[1:] for p in PAIRS],
        ["token-ngram", "block-suffix", "coupled-prompt-lookup", "block-model", "coupled-model",
         "token-early-exit", "tree-ngram", "tree-model"],
        [f"{r}-{n}" for n, r, _ in PAIRS],
    ),
)  # fmt: skip
FILTERS = ["plain", "temperature", "top-k", "top-p", "min-p", "filters"]
PENALTIES = ["repetition", "presence", "frequency", "bias", "all"]
every_rule = pytest.mark.parametrize("rule", ["token", "block", "coupled", "tree"])
some_rules = pytest.mark.parametrize("rule", budgeted(["token", "block", "coupled", "tree"], ["block", "tree"]))


def engine(make, rule: str) -> dp.Engine:
    slots = 6 if rule == "tree" else SLOTS
    return dp.load(llama(), make(), rule=rule, num_draft_tokens=slots, max_batch=500, branches=_branches(make, rule))


def _branches(make, rule: str) -> int:
    return 2 if rule == "tree" and make() != "prompt-lookup" else 1


def check(decoder: dp.Engine, samplings: list[SamplingParams], n: int, budget: int = BUDGET) -> None:
    """Test the texts of each sampling against its own distribution; the samplings take turns over n texts."""
    made = sample_texts(decoder, PROMPT, samplings, n, length=LENGTH, budget=budget)
    assert made.drafting_mattered
    for i, sampling in enumerate(samplings):
        seen = counts(made.texts[i :: len(samplings)], V)
        value = g_test(seen, joint_distribution(llama(), PROMPT, sampling, LENGTH))
        assert value > ALPHA, f"{sampling}: p = {value:.1e} over {int(seen.sum())} texts"


@one_rule_a_drafter
def test_texts_have_the_targets_joint_distribution_with_every_drafter(rule, make):
    """3,000 texts: TV 0.14. The suffix automaton is slow under executed annotations and makes 600: TV 0.3. Its tokens
    are chosen, like those of the other copying drafters."""
    decoder = engine(make, rule)
    check(decoder, [WARPS["filters"]], 600 if isinstance(decoder.drafter, Suffix) else 3000)


@some_rules
def test_texts_have_the_targets_joint_distribution_under_all_warps_at_once(rule):
    """2,000 texts: TV 0.17."""
    check(engine(neighbour, rule), [WARPS["all"]], 2000)


@pytest.mark.parametrize("rule", budgeted(["token", "block", "coupled", "tree"], ["block"]))
def test_rows_of_one_batch_each_have_the_distribution_of_their_own_sampling(rule):
    """Every warp in turn, 200 texts each in mixed batches: TV 0.5 for each (greedy: a single wrong text). Another test
    of mixed batches, `test_a_row_does_not_depend_on_its_neighbours`, compares token for token."""
    check(engine(neighbour, rule), list(WARPS.values()), 200 * len(WARPS))


@pytest.mark.parametrize("size", budgeted([V - 2, V + 3], [V - 2]))
def test_another_vocabulary_of_the_drafter_changes_nothing(size):
    """3,000 texts: TV 0.14."""
    check(engine(lambda: neighbour(size), "block"), [WARPS["filters"]], 3000)


@pytest.mark.parametrize("rule", budgeted(["block", "tree"], ["block"]))
def test_an_adaptive_draft_length_changes_nothing(rule):
    """3,000 texts of up to 8 tokens, so that later lengths depend on earlier rounds: TV 0.14 in the first three."""
    made = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens="auto", max_batch=500)
    check(made, [WARPS["filters"]], 3000, budget=8)


@pytest.mark.parametrize("warp", budgeted(FILTERS, []))
def test_each_filter_alone_has_its_distribution(warp):
    """10,000 texts: TV 0.075, and 0.046 if few tokens are left."""
    check(engine(neighbour, "block"), [WARPS[warp]], 10_000)


@pytest.mark.parametrize("warp", budgeted(PENALTIES, []))
def test_each_penalty_alone_has_its_distribution(warp):
    """3,000 texts: TV 0.14. Penalties are applied row by row, which is slow."""
    check(engine(neighbour, "block"), [WARPS[warp]], 3000)


@pytest.mark.slow
@pytest.mark.parametrize("warp", WARPS)
@every_pair
def test_the_whole_grid(rule, make, warp):
    """4,000 texts: TV 0.12."""
    if warp == "greedy":
        pytest.skip("one text only: engine/test_greedy.py compares it token for token")
    decoder = engine(make, rule)
    check(decoder, [WARPS[warp]], 600 if isinstance(decoder.drafter, Suffix) else 4000)


@pytest.mark.slow
@every_rule
def test_texts_have_the_targets_joint_distribution_in_large_samples(rule):
    """100,000 texts: TV 0.024, and 0.015 if the filters leave 64 texts."""
    check(engine(neighbour, rule), [WARPS["filters"]], 100_000)
