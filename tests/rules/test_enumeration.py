"""Every exact rule has the target's distribution, summed over all drafts and all outcomes in float64: no sampling."""

import pytest
import torch

from draftproof.auditor.enumerate import round_distribution
from draftproof.rules.block import stop_table as block_stop_table
from draftproof.rules.token import stop_table as token_stop_table
from draftproof.rules.tree import stop_table as tree_stop_table
from worlds import TREES, chains, trees

EXACT = 1e-12
CHAIN_RULES = {"token": token_stop_table, "block": block_stop_table, "tree": tree_stop_table}
SIZES = [(2, 1, 400), (2, 3, 300), (3, 2, 300), (4, 3, 150)]  # V, K, worlds: 1 150 instances of each kind


@pytest.mark.parametrize("kind", ["drawn", "chosen", "mixed", "ragged"])
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_round_on_chains_has_exactly_the_targets_distribution(rule, kind):
    for V, K, N in SIZES:
        worlds = chains(N, V, K, seed=V * 10 + K, kind=kind)
        assert (round_distribution(CHAIN_RULES[rule], worlds).dist - worlds.joint).abs().max() <= EXACT


@pytest.mark.parametrize("kind", ["iid", "without", "chosen", "mixed"])
@pytest.mark.parametrize("shape", TREES)
def test_a_round_on_trees_has_exactly_the_targets_distribution(shape, kind):
    for V, N in ((2, 150), (3, 100)):
        worlds = trees(N, V, TREES[shape], seed=V, kind=kind)
        assert (round_distribution(tree_stop_table, worlds).dist - worlds.joint).abs().max() <= EXACT


def test_the_worlds_hold_every_awkward_distribution():
    worlds = chains(300, 4, 3, seed=43)
    assert worlds.draft.q is not None
    p, q = worlds.p.probs(), worlds.draft.q.probs()
    assert (p == 0).any()
    assert (p == 1).any()
    assert (q == 1).any()
    head = p[:, :3]
    assert (head == q).all(-1).any()  # identical
    assert ((head * q).sum(-1) == 0).any()  # disjoint
    assert (head[..., :1] == head[..., 1:2]).any()  # ties


def test_block_never_keeps_less_than_token_and_often_more():
    worlds = chains(300, 4, 3, seed=5)
    more = round_distribution(block_stop_table, worlds).kept - round_distribution(token_stop_table, worlds).kept
    assert more.min() >= -1e-12
    assert (more > 1e-3).float().mean() > 0.2


def test_block_reproduces_the_papers_example():
    """With p = (1/3, 2/3), q = (2/3, 1/3) and K = 2, 10/9 tokens are kept token by token and 11/9 as a block."""
    from itertools import product

    from draftproof.auditor.enumerate import Scenarios
    from draftproof.core.distribution import Distribution
    from draftproof.core.types import Draft

    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    q = p.flip(0)
    tokens = torch.tensor(list(product(range(2), repeat=2)))
    joint = torch.einsum("a,b,c->abc", p, p, p).flatten()[None]
    worlds = Scenarios(
        joint,
        torch.zeros(4, dtype=torch.long),
        q[tokens].prod(1),
        Distribution.of(p.expand(4, 3, 2)),
        Draft(tokens, torch.full((4,), 2), Distribution.of(q.expand(4, 2, 2))),
    )
    assert round_distribution(token_stop_table, worlds).kept.item() == pytest.approx(10 / 9, abs=1e-12)
    assert round_distribution(block_stop_table, worlds).kept.item() == pytest.approx(11 / 9, abs=1e-12)


def test_the_stop_table_of_a_chain_as_a_tree_is_that_of_a_block():
    worlds = chains(100, 3, 3, seed=8)
    one, other = block_stop_table(worlds.p, worlds.draft), tree_stop_table(worlds.p, worlds.draft)
    torch.testing.assert_close(one.chance, other.chance, atol=1e-12, rtol=0)
    assert torch.equal(one.node, other.node)


def lp_optimum(joint, V, K, worlds):
    """Return the most tokens that any valid rule can keep if it emits a prefix of the draft and one more token.

    A linear programme. The unknowns are the masses of (draft, kept, last token). They must add up to the probability of
    each draft, and the emitted tokens, continued by the target, to the target's distribution. Such a rule may use
    everything, also positions that are not on the draft's path.
    """
    from itertools import product

    import numpy as np
    from scipy.optimize import linprog

    dist = joint.view((V,) * (K + 1)).numpy()
    drafts = worlds.draft.tokens.tolist()
    unknowns = [(r, kept, y) for r in range(len(drafts)) for kept in range(K + 1) for y in range(V)]
    texts = {s: i for i, s in enumerate(product(range(V), repeat=K + 1))}
    A = np.zeros((len(drafts) + len(texts), len(unknowns)))
    for column, (r, kept, y) in enumerate(unknowns):
        A[r, column] = 1
        emitted = (*drafts[r][:kept], y)
        total = dist[emitted].sum()
        for rest in product(range(V), repeat=K - kept):
            text = emitted + rest
            A[len(drafts) + texts[text], column] = dist[text] / total if total > 0 else 0
    b = np.concatenate([worlds.chance.numpy(), dist.flatten()])
    best = linprog([-kept for _, kept, _ in unknowns], A_eq=A, b_eq=b, method="highs")
    assert best.status == 0, best.message
    return -best.fun


def test_block_keeps_as_much_as_any_valid_rule_can():
    """Compare with the optimum of a linear programme over all valid single-path rules, on 12 full-support worlds."""
    V, K = 3, 2
    for seed in range(12):
        worlds = chains(1, V, K, seed=seed, full=True)
        best = lp_optimum(worlds.joint, V, K, worlds)
        assert round_distribution(block_stop_table, worlds).kept.item() == pytest.approx(best, abs=1e-9)
