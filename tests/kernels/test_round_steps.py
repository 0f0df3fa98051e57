"""The kernels between the passes of a round compute what their definitions in plain torch compute."""

import pytest
import torch

from draftproof.core.distribution import DraftVocab
from draftproof.core.types import PAD, Draft
from draftproof.kernels import Parameters, Rows, round_steps
from draftproof.kernels import round_steps_reference as reference
from draftproof.kernels.draw_rows import Drawn
from draftproof.kernels.round_table import BEHIND, END, LAST, LENGTH, LINES, PREVIOUS
from draftproof.kernels.workspace import ROW_STATS

COLUMNS, V = 7, 50
"""Columns of the table, of which rounds use fewer, and tokens of the vocabulary."""


def random(low, high, *shape, seed=0, device="cpu"):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def a_table(B, device, seed=0):
    """Return columns of texts before, at and after their end, with drafters that are behind by 0 to 2 tokens."""
    table = random(0, V, LINES, COLUMNS, seed=seed)
    table[LENGTH] = random(3, 12, COLUMNS, seed=seed + 1)
    table[END] = table[LENGTH] + random(-1, 6, COLUMNS, seed=seed + 2)
    table[END, ::4] = 0  # empty rows
    table[BEHIND] = random(0, 3, COLUMNS, seed=seed + 3)
    return table.to(device)[:, :B]


def same(made, wanted):
    assert type(made) is type(wanted)
    for name, one, other in zip(made._fields, made, wanted, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), (name, one, other)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 5), (5, 64)])
def test_where_the_tokens_of_a_pass_are(B, T, device):
    places = torch.stack([random(0, 900, B), random(0, 70, B, seed=1), random(0, T + 1, B, seed=2)]).to(device)
    for last in (40, 2**31 - 1):
        made = round_steps.lay_out(places, T, scratch=4096, last_position=last)
        same(made, reference.lay_out(places, T, scratch=4096, last_position=last))
    assert (made.slots == 4096).sum() == B * T - places[2].sum()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("K", [1, 4, 32])
def test_what_a_drafter_is_given(K, seed, device):
    table = a_table(5, device, seed)
    ready = (random(0, 2, COLUMNS, seed=seed) == 1).to(device)[:5]
    for behind_text, among in ((1, None), (2, ready)):
        options = {"vocab_size": 30, "behind_text": behind_text, "ready": among}
        made = round_steps.begin_draft(table, K, **options)
        same(made, reference.begin_draft(table, K, **options))
    assert not made.most[~ready].any()
    assert all(step.is_contiguous() and step.data_ptr() % 16 == 0 for step in made.places)


@pytest.mark.parametrize("kind", ["plain", "some greedy", "a part of the vocabulary", "both"])
def test_what_is_known_of_drawn_tokens(kind, device):
    B = 131  # more than a program has
    stats = torch.rand(B, ROW_STATS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stats[3, 2] = torch.nan  # not a distribution
    tokens = random(0, 30, B)
    tokens[3] = PAD
    cutoff, base, mass, *_ = stats.to(device).unbind(-1)
    greedy = (random(0, 2, B) == 1).to(device) if kind in ("some greedy", "both") else None
    ids = random(0, 1000, 30, seed=5, device=device) if kind in ("a part of the vocabulary", "both") else None
    drawn = Drawn(tokens.to(device), cutoff, base, mass)
    made, wanted = round_steps.describe_draws(drawn, greedy, ids), reference.describe_draws(drawn, greedy, ids)
    assert made.lse[3].isnan()
    assert torch.allclose(made.lse, wanted.lse, rtol=1e-15, atol=1e-15, equal_nan=True)
    known = wanted.lse.nan_to_num()
    same(made._replace(lse=known), wanted._replace(lse=known))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("K", [0, 3])
def test_what_the_target_is_given(K, seed, device):
    table = a_table(5, device, seed)
    draft = Draft(random(PAD, V + 3, 5, K, seed=seed, device=device), random(0, K + 1, 5, seed=seed, device=device))
    ours, theirs = (Parameters.empty(5, device) for _ in range(2))
    made = round_steps.begin_scoring(table, draft, V, ours)
    same(made, reference.begin_scoring(table, draft, V, theirs))
    assert torch.equal(ours.ints, theirs.ints)
    assert torch.equal(ours["lengths"], draft.lengths)


@pytest.mark.parametrize("reads", ["later", "at once", "when it drafts"])
@pytest.mark.parametrize("K", [0, 1, 4, 32])
def test_how_a_round_ends(K, reads, device):
    for seed in range(6):
        ours = a_table(6, device, seed)
        theirs, before = ours.clone(), ours.clone()
        lengths = random(0, K + 1, 6, seed=seed, device=device)
        accepted = torch.minimum(random(0, K + 1, 6, seed=seed + 9, device=device), lengths)
        faults = (random(0, 4, 6, seed=seed) == 0).int().to(device)
        verdict = Rows(random(0, V, 6, K + 1, seed=seed, device=device), accepted, faults)
        made = round_steps.conclude(ours, verdict, lengths, reads)
        same(made, reference.conclude(theirs, verdict, lengths, reads))
        assert torch.equal(ours, theirs)
        for b in range(6):
            texts = [before[PREVIOUS, b], before[LAST, b], *verdict.tokens[b, : made.counts[b]]]
            assert texts[-1] == ours[LAST, b]
            assert texts[-2] == ours[PREVIOUS, b]


def test_the_rest_of_the_table_is_left_alone(device):
    """Columns beyond the rows of a round belong to nobody, but a later round has them."""
    whole = random(0, 9, LINES, COLUMNS, device=device)
    before = whole.clone()
    zeros = torch.zeros((2, 1), dtype=torch.long, device=device)
    verdict = Rows(zeros, zeros[:, 0], zeros[:, 0].int())
    round_steps.conclude(whole[:, :2], verdict, verdict.accepted, "later")
    assert torch.equal(whole[:, 2:], before[:, 2:])


def test_a_vocabulary_that_is_mapped_by_the_wrong_table_is_found(device):
    """Control: entries where ids are wanted."""
    vocab = DraftVocab.of(torch.tensor([4, 7, 9], device=device), V)
    drawn = Drawn(torch.tensor([2], device=device), *torch.ones(3, 1, dtype=torch.float64, device=device))
    assert round_steps.describe_draws(drawn, None, vocab.ids).tokens.tolist() == [9]
    assert round_steps.describe_draws(drawn, None, vocab.entry).tokens.tolist() != [9]
