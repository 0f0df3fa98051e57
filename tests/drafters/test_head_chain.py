"""A compiled head drafts in one call what it drafts step by step, and a row drafts the same in any company."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from drafters.toy_rounds import Row, rng_of, row
from draftproof.core.distribution import DraftVocab
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import PAD
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.head_reader import HeadReader
from draftproof.drafters.interface import TargetOutputs
from draftproof.models.compiled_pass import compile_linears
from draftproof.models.head.network import FittedHead, Head, HeadShape, linear_on
from draftproof.models.int4_linear import pack_int4
from models.int4_models import needs_compiled, needs_int4

pytestmark = [needs_int4, needs_compiled]

V, ENTRIES, H = 256, 192, 64
S = SamplingParams
GREEDY, WARM, HOT = S(temperature=0), S(temperature=0.8), S(temperature=1.5)
FILTERED, PENALISED = S(temperature=0.8, top_k=5), S(temperature=0, repetition_penalty=1.3)
TEXTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9], [1, 4, 1, 4, 2], [5, 7, 7, 2, 1, 5, 6]]
KINDS = [WARM, GREEDY, FILTERED, HOT, PENALISED]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def head() -> FittedHead:
    """Return a head of random weights whose tokens are some of the target's, in another order."""
    network = Head(HeadShape(H, 4, 2, 32, 128, 10000.0, 1e-5, (1, 2))).eval().requires_grad_(False)
    rows = nn.Sequential(linear_on(random(ENTRIES, H, seed=1) * 0.4).requires_grad_(False))
    for part in (network, rows):
        assert pack_int4(part)
        compile_linears(part)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:ENTRIES]
    return FittedHead(network, random(V, H, seed=3), rows, DraftVocab.of(ids, V))


def asked(name: int, sampling: SamplingParams, first: int = 0) -> Row:
    made = row(name, TEXTS[name], replace(sampling, seed=100 + name))
    n = len(made.tokens) - 1
    states = tuple(random(n, H, seed=10 * name + tap)[first:] for tap in (1, 2))
    made.target_outputs = TargetOutputs(n, None, states)
    return made


def proposed(contexts: list[Row], k: list[int], **options):
    return HeadDrafter(head(), **options).propose(contexts, k, rng_of(contexts))


@pytest.fixture
def step_by_step(monkeypatch):
    """Return a function that switches compiled drafts off."""
    return lambda: monkeypatch.setattr(HeadReader, "is_compiled", property(lambda self: False))


@pytest.mark.parametrize("sampling", [GREEDY, WARM, HOT])
@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_one_call_drafts_what_single_steps_draft(sampling, confidence, step_by_step):
    contexts = [asked(name, sampling) for name in range(3)]
    made = proposed(contexts, [4, 0, 3], confidence=confidence)
    step_by_step()
    expected = proposed(contexts, [4, 0, 3], confidence=confidence)
    assert made.tokens.tolist() == expected.tokens.tolist()
    assert made.lengths.tolist() == expected.lengths.tolist()
    assert (made.q is None) == (sampling is GREEDY) == (expected.q is None)
    if made.q is not None:
        there = made.tokens != PAD
        torch.testing.assert_close(made.q.probs()[there], expected.q.probs()[there])


def test_every_distribution_is_the_heads_own_at_the_rows_temperature():
    contexts = [asked(0, WARM), asked(1, HOT)]
    draft = proposed(contexts, [3, 3])
    for b, sampling in enumerate((WARM, HOT)):
        dist = warp(draft.q.logits[b : b + 1], [sampling], vocab=head().vocab)
        torch.testing.assert_close(draft.q.probs()[b], dist.probs()[0])
        assert bool((draft.q.log_prob(draft.tokens)[b] > -30).all())


@pytest.mark.parametrize("k", [[4, 4, 4, 4, 4], [2, 5, 0, 1, 3]])
def test_a_row_drafts_the_same_alone_and_among_others(k):
    """Rows of all kinds together: drawn at two temperatures, greedy, filtered, and greedy with a penalty."""
    contexts = [asked(name, sampling) for name, sampling in enumerate(KINDS)]
    together = proposed(contexts, k, confidence="auto")
    for b, context in enumerate(contexts):
        alone = proposed([context], [k[b]], confidence="auto")
        n = int(alone.lengths[0])
        assert int(together.lengths[b]) == n or KINDS[b] is PENALISED  # not alone, such a row is not ended early
        assert together.tokens[b, :n].tolist() == alone.tokens[0].tolist()
        drawn = together.drawn[b] if together.drawn is not None else torch.ones(max(k), dtype=torch.bool)
        if KINDS[b] is GREEDY and n:
            assert not bool(drawn[:n].any()), "chosen, not drawn"
        if alone.q is not None:
            assert bool(drawn[:n].all())
            assert torch.equal(together.q.logits[b, :n], alone.q.logits[0, :n])
            assert torch.equal(together.q.lse[b, :n], alone.q.lse[0, :n])


def test_new_states_are_read_once_and_a_second_proposal_is_the_same():
    context, drafter = asked(2, WARM), HeadDrafter(head())
    whole = drafter.propose([context], [3], rng_of([context]))
    assert not drafter._memory.rows[2].waiting
    again = drafter.propose([context], [3], rng_of([context]))
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert torch.equal(again.q.logits, whole.q.logits)


def test_states_that_come_in_parts_give_the_same_draft():
    whole = proposed([asked(2, WARM)], [3])
    context, drafter = asked(2, WARM), HeadDrafter(head())
    outputs, tokens = context.target_outputs, context.tokens
    context.tokens, context.target_outputs = tokens[:5], TargetOutputs(4, None, tuple(s[:4] for s in outputs.hidden))
    drafter.propose([context], [2], rng_of([context]))
    context.tokens, context.target_outputs = tokens, TargetOutputs(7, None, tuple(s[4:] for s in outputs.hidden))
    draft = drafter.propose([context], [3], rng_of([context]))
    assert draft.tokens.tolist() == whole.tokens.tolist()
    assert torch.equal(draft.q.logits, whole.q.logits)


def test_a_draft_with_shared_random_numbers_is_not_drawn_in_one_call(monkeypatch):
    monkeypatch.setattr(HeadReader, "draft", None)
    context = asked(0, WARM)
    draft = HeadDrafter(head()).propose([context], [2], replace(rng_of([context]), shared=True))
    assert draft.shared_rng
