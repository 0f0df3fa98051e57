"""Test every drafter with every rule: what all combinations must do.

Single drafters are tested in drafters/test_drafter_conformance.py, single rules in rules/.
"""

import pytest
import torch

import draftproof as dp
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD, Draft, InexactError
from draftproof.drafters.interface import Drafter
from draftproof.drafters.registry import DRAFTERS, resolve
from draftproof.models.hf import HFModel
from draftproof.rules import RULES, Verifier
from engine.tiny import PROMPT, V, llama, neighbour

NAMES = [*DRAFTERS, "early-exit:1", "a model"]
WARM = SamplingParams(temperature=0.9, top_k=6, seed=11)
every_name = pytest.mark.parametrize("name", NAMES)
every_rule = pytest.mark.parametrize("rule", RULES)


def engine(name: str, rule: str, branches: int = 1) -> dp.Engine:
    drafter = neighbour() if name == "a model" else name
    return dp.load(llama(), drafter, rule=rule, num_draft_tokens=4, branches=branches)


@every_rule
@every_name
def test_every_drafter_goes_with_every_rule(name, rule):
    prompts = [list(PROMPT), [3], [2, 2, 2, 2]]
    outputs = engine(name, rule).generate(prompts, WARM, max_tokens=[9, 1, 20])
    assert [len(output.tokens) for output in outputs] == [9, 1, 20]
    for output in outputs:
        stats = output.stats
        assert all(0 <= token < V for token in output.tokens)
        assert stats.emitted == len(output.tokens) == stats.accepted + stats.rounds
        assert stats.accepted <= stats.drafted <= 4 * stats.drafts
        assert sum(stats.accepted_at) == stats.accepted


@every_rule
@every_name
def test_the_same_request_gives_the_same_text_again(name, rule):
    one, other = (engine(name, rule).generate(list(PROMPT), WARM, max_tokens=12).tokens for _ in range(2))
    assert one == other


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "tree"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "prompt-lookup"])
def test_a_tree_goes_with_the_tree_rule_alone(name, rule):
    prompts = [[0, 1, 2, 0, 1, 3, 0, 1]]
    assert engine(name, "tree", branches=2).generate(prompts, WARM, max_tokens=6)[0].stats.drafted > 0
    with pytest.raises(InexactError, match='use rule="tree"'):
        engine(name, rule, branches=2).generate(prompts, WARM, max_tokens=6)


@every_name
def test_every_name_in_the_registry_makes_a_drafter(name):
    made = engine(name, "block").drafter
    assert isinstance(made, Drafter)
    if name != "a model":
        assert isinstance(resolve(name, HFModel(llama())), type(made))


# -------------------------------------------------------------------------------------------------------- rules


def dists(B: int, J: int, seed: int) -> Distribution:
    numbers = torch.Generator().manual_seed(seed)
    return Distribution.of(torch.rand((B, J, V), generator=numbers).pow(3))


def make_draft(B: int, K: int, q: Distribution | None, lengths: list[int]) -> Draft:
    tokens = torch.randint(V, (B, K), generator=torch.Generator().manual_seed(3))
    return Draft(tokens, torch.tensor(lengths), q)


@every_rule
def test_a_rule_is_a_verifier_and_a_pure_function(rule):
    p, rng = dists(5, 4, 1), Philox(torch.arange(5), torch.arange(5) + 9)
    draft = make_draft(5, 3, dists(5, 3, 2), [3, 0, 2, 1, 3])
    before = p.logits.clone(), draft.tokens.clone()
    one, other = RULES[rule](p, draft, rng), RULES[rule](p, draft, rng)
    assert isinstance(RULES[rule], Verifier)
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(p.logits, before[0])
    assert torch.equal(draft.tokens, before[1])
    assert one.exact


@every_rule
@pytest.mark.parametrize("drawn", [True, False])
def test_a_verdict_is_a_prefix_of_the_draft_and_one_more_token(rule, drawn):
    lengths = [3, 0, 2, 1, 3, 3]
    draft = make_draft(6, 3, dists(6, 3, 2) if drawn else None, lengths)
    for seed in range(20):
        verdict = RULES[rule](dists(6, 4, 1), draft, Philox(torch.arange(6) + 100 * seed, torch.arange(6)))
        for b, length in enumerate(lengths):
            n = int(verdict.accepted[b])
            assert 0 <= n <= length
            assert verdict.tokens[b, :n].tolist() == draft.tokens[b, :n].tolist()
            assert 0 <= int(verdict.tokens[b, n]) < V
            assert (verdict.tokens[b, n + 1 :] == PAD).all()


@every_rule
def test_a_row_of_a_verdict_does_not_depend_on_its_neighbours(rule):
    p, q = dists(5, 4, 1), dists(5, 3, 2)
    draft, rng = make_draft(5, 3, q, [3, 0, 2, 1, 3]), Philox(torch.arange(5) * 7, torch.arange(5) + 9)
    together = RULES[rule](p, draft, rng)
    for b in range(5):
        row = torch.tensor([b])
        one = Draft(draft.tokens[row], draft.lengths[row], Distribution.of(q.probs()[row]))
        alone = RULES[rule](Distribution.of(p.probs()[row]), one, rng.take(row))
        assert alone.tokens.tolist() == together.tokens[row].tolist()


@every_rule
def test_no_draft_at_all_is_one_draw_from_the_target(rule):
    p = Distribution.of(torch.nn.functional.one_hot(torch.tensor([[4], [6]]), V).float())
    nothing = Draft(torch.empty((2, 0), dtype=torch.long), torch.zeros(2, dtype=torch.long))
    verdict = RULES[rule](p, nothing, Philox(torch.arange(2), torch.arange(2)))
    assert verdict.tokens.tolist() == [[4], [6]]
    assert verdict.accepted.tolist() == [0, 0]
