"""Both traversals of a tree, slot by slot and depth first, agree with the recursion that defines the rule."""

from dataclasses import replace

import pytest
import torch

from draftproof.auditor.enumerate import round_distribution
from draftproof.core import device as core_device
from draftproof.core.distribution import Distribution, DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.tree import Shape, check_parents
from draftproof.core.types import PAD, ROOT, Draft
from draftproof.rules.tree import Walk, stop_table, tree
from worlds import TREES, trees

V = 5
KINDS = ("drawn", "chosen", "mixed")


def rounds(seed: int, kind: str, K: int = 7, B: int = 6):
    """Make random trees of different shapes and lengths, near enough to their target to be accepted sometimes."""
    numbers = torch.Generator().manual_seed(seed)
    p = torch.randn((B, K + 1, V), generator=numbers, dtype=torch.float64).mul(1.5).softmax(-1)
    parents = torch.tensor([[int(torch.randint(ROOT, i, (), generator=numbers)) for i in range(K)] for _ in range(B)])
    q = p[torch.arange(B)[:, None], parents + 1] * torch.rand((B, K, V), generator=numbers, dtype=torch.float64)
    q = q / q.sum(-1, keepdim=True)
    tokens = q.flatten(0, 1).multinomial(1, generator=numbers).view(B, K)
    lengths = torch.randint(K + 1, (B,), generator=numbers)
    beyond = torch.arange(K) >= lengths[:, None]
    draft = Draft(
        tokens.masked_fill(beyond, PAD),
        lengths,
        None if kind == "chosen" else Distribution.of(q),
        torch.rand((B, K), generator=numbers) < 0.5 if kind == "mixed" else None,
        parents.masked_fill(beyond, ROOT),
    )
    return Distribution.of(p), draft, Philox(torch.randint(2**62, (B,), generator=numbers), torch.arange(B) + 3)


def recursion(p: Distribution, draft: Draft, rng: Philox, b: int, *, siblings=list) -> tuple[int, torch.Tensor]:
    """Return where row b stops and the distribution of its last token, by the rule's definition.

    `siblings` orders the children of a node.
    """
    dists, coins = p.probs()[b].clone(), rng.coins(draft.tokens.shape[1])[b].tolist()
    tokens, length = draft.tokens[b].tolist(), int(draft.lengths[b])
    parents = list(range(-1, length - 1)) if draft.parents is None else draft.parents[b].tolist()

    def slot_distribution(slot: int) -> torch.Tensor:
        if draft.q is None or (draft.drawn is not None and not draft.drawn[b, slot]):
            return torch.nn.functional.one_hot(torch.tensor(tokens[slot]), V).double()
        return draft.q.probs()[b, slot]

    def visit(node: int, w: float) -> tuple[int, torch.Tensor] | None:
        for slot in siblings([i for i in range(length) if parents[i] == node - 1]):
            q = slot_distribution(slot)
            found = visit(slot + 1, min(1.0, w * float(dists[node, tokens[slot]] / q[tokens[slot]])))
            if found is not None:
                return found
            spare = (w * dists[node] - q).clamp_min(0)
            mass = float(spare.sum())
            w = mass / (mass + 1 - w) if mass > 0 else 0.0
            dists[node] = spare / mass if mass > 0 else dists[node]
        return (node, dists[node]) if node == 0 or coins[node - 1] < w else None

    found = visit(0, 1.0)
    assert found is not None
    return found


def stops(draft: Draft, verdict) -> list[int]:
    """Return the node at which each row stopped."""
    last = verdict.path.gather(1, (verdict.accepted - 1).clamp_min(0)[:, None])[:, 0] if draft.tokens.shape[1] else None
    return [0 if n == 0 else int(last[b]) + 1 for b, n in enumerate(verdict.accepted.tolist())]


@pytest.fixture(params=["depth first", "slot by slot"])
def traversal(request, monkeypatch):
    """Run the traversal of the CPU, and that of a GPU, which never synchronises."""
    if request.param == "slot by slot":
        monkeypatch.setattr(core_device, "HOST", "none")
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_stops_where_the_recursion_says(traversal, kind):
    met, mirrored = set(), 0
    for seed in range(40):
        p, draft, rng = rounds(seed, kind)
        found = stops(draft, tree(p, draft, rng))
        assert found == [recursion(p, draft, rng, b)[0] for b in range(6)]
        met |= set(found)
        mirrored += found != [recursion(p, draft, rng, b, siblings=reversed)[0] for b in range(6)]
    assert len(met) >= 7, "rows stopped at nearly every node"
    assert mirrored > 5, "another order of siblings gives other stops"


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_at_every_stopping_point_is_the_recursions(kind):
    """The stop table holds the distribution of the last token at all stopping points."""
    for seed in range(20):
        p, draft, rng = rounds(seed, kind)
        table = stop_table(p, draft)
        for b in range(6):
            node, dist = recursion(p, draft, rng, b)
            at = table.node[b].tolist().index(node)
            torch.testing.assert_close(table.closing[b, at], dist, atol=1e-12, rtol=0)


def depth_first(p, draft):
    """Return the stop table of the depth-first traversal; with coins of 1 no row stops early."""
    return Walk.to_the_first_stop(p, draft, torch.ones((len(draft.tokens), draft.tokens.shape[1] + 1))).table()


@pytest.mark.parametrize("kind", ["iid", "without", "chosen", "mixed"])
@pytest.mark.parametrize("shape", TREES)
def test_depth_first_a_round_has_exactly_the_targets_distribution(shape, kind):
    """Repeat test_enumeration.py, which goes slot by slot, with the depth-first traversal."""
    worlds = trees(60, 3, TREES[shape], seed=3, kind=kind)
    assert (round_distribution(depth_first, worlds).dist - worlds.joint).abs().max() <= 1e-12


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("vocab", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("samplings", [FILTERS, [SamplingParams()] * 4], ids=["filtered", "plain"])
def test_both_traversals_return_the_same_verdict(monkeypatch, samplings, vocab):
    """Tokens and slots are equal in float32 with several chunks of tokens, although distributions round differently."""
    kept = 0
    for seed in range(10):
        numbers = torch.Generator().manual_seed(seed)
        logits = torch.randn((4, 1, 1200), generator=numbers) * 3 + torch.randn((4, 8, 1200), generator=numbers) * 0.3
        ids = torch.randperm(1200, generator=numbers)[:900] if vocab else torch.arange(1200)
        q = warp(logits[:, 1:, ids], samplings, vocab=DraftVocab.of(ids, 1200) if vocab else None)
        tokens = q.probs().flatten(0, 1).multinomial(1, generator=numbers).view(4, 7)
        _, shaped, rng = rounds(seed, "mixed", B=4)
        parents = None if seed % 4 == 0 else shaped.parents
        draft = Draft(tokens, shaped.lengths, q, shaped.drawn if seed % 3 else None, parents)
        on_cpu = tree(warp(logits, samplings), draft, rng)
        with monkeypatch.context() as patch:
            patch.setattr(core_device, "HOST", "none")
            on_gpu = tree(warp(logits, samplings), draft, rng)
        for part in ("tokens", "accepted", "path"):
            assert torch.equal(getattr(on_cpu, part), getattr(on_gpu, part))
        kept += int(on_cpu.accepted.sum())
    assert kept > 20


def test_nothing_drafted_is_a_draw_from_the_target(traversal):
    dist = Distribution.of(torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64))
    empty = torch.empty((1, 0), dtype=torch.long)
    for draft in (Draft(empty, torch.tensor([0])), Draft(empty, torch.tensor([0]), parents=empty)):
        verdict = tree(dist, draft, Philox(torch.tensor([1]), torch.tensor([1])))
        assert (verdict.tokens.tolist(), verdict.accepted.tolist()) == ([[1]], [0])


def test_padding_after_a_draft_is_not_used(traversal):
    """Parents, tokens and distributions after a draft's end may be anything."""
    p, draft, rng = rounds(2, "drawn")
    beyond = torch.arange(7) >= draft.lengths[:, None]
    logits = p.logits.masked_fill(torch.nn.functional.pad(beyond, (1, 0))[..., None], torch.nan)
    odd = replace(draft, parents=draft.parents.masked_fill(beyond, 99))
    assert beyond.any()
    assert torch.equal(tree(replace(p, logits=logits), odd, rng).tokens, tree(p, draft, rng).tokens)


@pytest.mark.parametrize("parent", [3, 4, 6, -2])
def test_a_misplaced_slot_is_refused_on_the_cpu_and_ends_the_draft_on_a_gpu(parent, monkeypatch):
    """On a GPU a check here would synchronise; the engine reports the slot after the round (engine/round.py)."""
    p, draft, rng = rounds(1, "drawn")
    draft = replace(draft, lengths=torch.full((6,), 7), tokens=draft.tokens.clamp_min(0))
    wrong = replace(draft, parents=draft.parents.clone())
    wrong.parents[2, 3] = parent
    with pytest.raises(ValueError, match=rf"parents\[2, 3\] is {parent}: a slot's parent must be -1"):
        tree(p, wrong, rng)
    with pytest.raises(ValueError, match=rf"parents\[2, 3\] is {parent}"):
        check_parents(wrong)
    monkeypatch.setattr(core_device, "HOST", "none")
    shorter = replace(draft, lengths=torch.tensor([7, 7, 3, 7, 7, 7]))
    assert torch.equal(tree(p, wrong, rng).tokens, tree(p, shorter, rng).tokens)


def test_turns_and_paths_of_a_tree():
    """Slots 0 and 1 are children of the root, 2 and 4 of slot 0, 3 of slot 1, 5 of slot 2."""
    parents = torch.tensor([[ROOT, ROOT, 0, 1, 0, 2], [ROOT, ROOT, 0, 1, 0, 2]])
    shape = Shape.of(Draft(torch.zeros((2, 6), dtype=torch.long), torch.tensor([6, 4]), parents=parents))
    assert shape.turn.argsort(1).tolist() == [[6, 3, 5, 1, 4, 2, 0], [3, 1, 4, 2, 0, 5, 6]]
    assert shape.path(torch.tensor([6, 0])).tolist() == [[0, 2, 5, PAD, PAD, PAD], [PAD] * 6]
    first, second = shape.visits()
    assert [(v.entered, v.node) for v in first] == [([1, 3, 6], 6), ([], 3), ([5], 5), ([], 1), ([2, 4], 4), ([], 2)]
    assert [v.node for v in second] == [3, 1, 4, 2]
