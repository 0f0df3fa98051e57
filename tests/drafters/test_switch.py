"""`Switch`: the context alone decides which drafter a row uses, and the draft marks which tokens were drawn."""

from itertools import pairwise

import pytest
import torch

from drafters.test_head import asked, unpacked
from drafters.toy_rounds import rng_of, row
from draftproof.core.distribution import Distribution
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD, Draft
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.interface import TargetFeatures, features_of
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch, merged
from draftproof.models.toy import Toy
from engine.tiny_heads import IDS

REPEATING = [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
FRESH = [5, 2, 7, 1, 0, 4]


def switch(branches: int = 1, **options: int) -> Switch:
    return Switch(Suffix(branches=branches), HeadDrafter(unpacked(5), branches=branches), **options)


def test_a_text_that_repeats_itself_is_copied_and_for_others_the_head_draws():
    contexts = [asked(REPEATING, name=0), asked(FRESH, name=1)]
    draft = switch().propose(contexts, [5, 2], rng_of(contexts))
    assert draft.tokens[0].tolist() == [3, 4, 5, 6, 0]
    assert draft.lengths.tolist() == [5, 2]
    assert draft.drawn.tolist() == [[False] * 5, [True, True, False, False, False]]
    head = HeadDrafter(unpacked(5)).propose(contexts[1:], [2], rng_of(contexts[1:]))
    assert draft.tokens[1].tolist() == [*head.tokens[0].tolist(), PAD, PAD, PAD]
    torch.testing.assert_close(draft.q.probs()[1, :2], head.q.probs()[0])


def test_the_choice_of_drafter_does_not_depend_on_the_draft_length():
    for most in range(1, 12):
        contexts = [asked(REPEATING, name=0), asked(FRESH, name=1)]
        draft = switch().propose(contexts, [most, most], rng_of(contexts))
        assert draft.lengths.tolist() == [most, most]
        assert draft.drawn.any(1).tolist() == [False, True]


def test_a_batch_that_only_copies_carries_no_distribution_and_one_that_only_draws_no_mask():
    for text, copied in ((REPEATING, True), (FRESH, False)):
        contexts = [asked(text, name=name) for name in range(2)]
        draft = switch().propose(contexts, [3, 2], rng_of(contexts))
        assert (draft.q is None) == copied
        assert draft.drawn is None


def test_a_head_that_did_not_draft_has_followed_the_text():
    """Both are called in every round, so the head gets the states of the rounds in which the other copied."""
    context, drafter = asked(REPEATING, name=0), switch()
    for more in ([3, 4, 5, 6, 0], [1, 2], [6, 2, 7]):
        drafter.propose([context], [4], rng_of([context]))
        first = len(context.tokens) - 1
        context.tokens = [*context.tokens, *more]
        context.target_outputs = asked(context.tokens, first=first).target_outputs
    draft = drafter.propose([context], [3], rng_of([context]))
    alone = HeadDrafter(unpacked(5)).propose([asked(context.tokens)], [3], rng_of([context]))
    assert draft.q is not None
    torch.testing.assert_close(draft.q.probs(), alone.q.probs())


def test_copied_and_drawn_trees_share_a_batch():
    contexts = [asked(REPEATING, name=0), asked(FRESH, name=1)]
    draft = switch(branches=2).propose(contexts, [6, 4], rng_of(contexts))
    head = HeadDrafter(unpacked(5), branches=2).propose(contexts[1:], [4], rng_of(contexts[1:]))
    assert draft.drawn.tolist() == [[False] * 6, [True, False, True, False, False, False]]
    assert draft.tokens[0, 0] == 3
    assert draft.tokens[1, :4].tolist() == head.tokens[0].tolist()
    assert draft.parents[1, :4].tolist() == head.parents[0].tolist()


def test_a_chain_beside_a_tree_is_a_tree_of_one_line():
    chain = Draft(torch.tensor([[3, 4, 5], [PAD] * 3]), torch.tensor([3, 0]))
    tree = Draft(
        torch.tensor([[PAD] * 4, [1, 2, 1, 2]]), torch.tensor([0, 4]), parents=torch.tensor([[-1] * 4, [-1, -1, 0, 0]])
    )
    both = merged(chain, tree)
    assert both.parents.tolist() == [[-1, 0, 1, PAD], [-1, -1, 0, 0]]
    assert both.tokens.tolist() == [[3, 4, 5, PAD], [1, 2, 1, 2]]
    assert merged(chain, chain).parents is None


def test_distributions_are_carried_past_their_end_for_rows_that_copied_more():
    dist = Distribution.of(torch.rand((2, 2, 8), generator=torch.Generator().manual_seed(0)))
    drawn = Draft(torch.tensor([[PAD, PAD], [1, 2]]), torch.tensor([0, 2]), dist)
    copied = Draft(torch.tensor([[3, 4, 5], [PAD] * 3]), torch.tensor([3, 0]))
    both = merged(copied, drawn)
    assert both.q.lse.shape == (2, 3)
    torch.testing.assert_close(both.q.probs()[:, :2], dist.probs())
    assert bool(both.q.lse.isfinite().all())


def test_the_features_of_both_drafters_are_requested():
    layers = HeadDrafter(unpacked()).features.layers
    assert features_of(Switch(NGram(fillers=3), HeadDrafter(unpacked()))) == TargetFeatures(layers, 3)
    with pytest.raises(ValueError, match="different layers"):
        Switch(HeadDrafter(unpacked()), NGram())


def test_a_copying_drafter_that_draws_is_refused():
    drafter = Switch(ModelDrafter(Toy.random(8, order=2, seed=1)), HeadDrafter(unpacked()))
    contexts = [row(0, FRESH, SamplingParams())]
    with pytest.raises(ValueError, match="ModelDrafter draws its tokens"):
        drafter.propose(contexts, [3], rng_of(contexts))


def test_a_lower_threshold_copies_more():
    contexts = [asked([0, 1, 2, 0, 1], name=0)]
    drafted = [switch(enough=n).propose(contexts, [3], rng_of(contexts)) for n in (1, 3, 30)]
    kinds = [draft.q is None for draft in drafted]
    assert kinds[0]
    assert not kinds[-1]
    assert all(one or not other for one, other in pairwise(kinds))
    assert set(drafted[-1].tokens[0].tolist()) <= set(IDS[:5])
