"""Sync-free bias and penalties are bitwise equal to the reference, with and without a draft."""

import pytest
import torch

from draftproof.core import device as core_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.penalties import edited_without_sync
from draftproof.core.sampling import SamplingParams, unedited, warp, warp_without_sync
from draftproof.core.types import PAD, ROOT, Draft, History

V, B = 12, 4
SAMPLINGS = [
    SamplingParams(repetition_penalty=1.3, temperature=0.7),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, logit_bias={2: 1.5, 11: -2.0}, top_k=5),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.2, temperature=0.0, logit_bias={0: -float("inf")}),
    SamplingParams(),
]
HISTORIES = [History([1, 2, 2], [3, 3, 3, 11]), History([0], [5, 5, 7]), History([4, 4], [4, 9]), History([1], [2])]


def on_device(history):
    return History(*(torch.tensor(part) for part in history))


@pytest.mark.parametrize("ids", [None, (7, 3, 0, 11, 5, 2)])
@pytest.mark.parametrize("J", [1, 3])
def test_distributions_without_sync_equal_the_reference(monkeypatch, ids, J):
    vocab = None if ids is None else DraftVocab.of(torch.tensor(ids), V)
    logits = torch.randn((B, J, V if ids is None else len(ids)), generator=torch.Generator().manual_seed(0)) * 3
    wanted = warp(logits, SAMPLINGS, HISTORIES, vocab=vocab)
    monkeypatch.setattr(core_device, "HOST", "none")
    made = warp_without_sync(logits, SAMPLINGS, [on_device(h) for h in HISTORIES], vocab)
    assert torch.equal(made.logits, wanted.logits)
    assert torch.equal(made.probs(), wanted.probs())


def drafts():
    """Return a chain and a tree with rows of different lengths, whose padding must not be counted."""
    tokens = torch.tensor([[3, 3, 1, 7], [5, 2, 5, 5], [9, 0, 4, 4], [2, 2, 2, 2]])
    lengths = torch.tensor([4, 3, 1, 2])
    tokens = tokens.masked_fill(torch.arange(4) >= lengths[:, None], PAD)
    parents = torch.tensor([[ROOT, ROOT, 0, 2], [ROOT, 0, 0, ROOT], [ROOT] * 4, [ROOT, ROOT, ROOT, ROOT]])
    return [Draft(tokens, lengths), Draft(tokens, lengths, parents=parents)]


@pytest.mark.parametrize("draft", drafts(), ids=["chain", "tree"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_targets_distribution_without_sync_counts_the_draft(monkeypatch, draft, masked):
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn((B, 5, V), generator=numbers) * 3
    allowed = torch.rand((B, 5, V), generator=numbers) < 0.7 if masked else None
    wanted = warp(logits, SAMPLINGS, HISTORIES, draft, allowed)
    uncounted = warp(logits, SAMPLINGS, HISTORIES, allowed=allowed)
    assert not torch.equal(uncounted.logits, wanted.logits)
    monkeypatch.setattr(core_device, "HOST", "none")
    made = warp_without_sync(logits, SAMPLINGS, HISTORIES, draft=draft, allowed=allowed)
    assert torch.equal(made.logits, wanted.logits)
    assert torch.equal(made.probs(), wanted.probs())


def test_a_bias_without_sync_needs_no_history(monkeypatch):
    logits, biased = torch.zeros((1, 1, V)), [SamplingParams(logit_bias={2: 1.5})]
    monkeypatch.setattr(core_device, "HOST", "none")
    assert warp_without_sync(logits, biased, None).logits[0, 0].tolist() == [0.0, 0.0, 1.5] + [0.0] * 9


def test_the_penalties_change_every_row_that_has_them():
    """The control: without it the equality tests would also pass if nothing were applied."""
    logits = torch.randn((B, 1, V), generator=torch.Generator().manual_seed(0)) * 3
    changed = (edited_without_sync(logits, SAMPLINGS, HISTORIES, None) != logits).flatten(1).any(1)
    assert changed.tolist() == [True, True, True, False]
    assert [s.temperature for s in unedited(SAMPLINGS)] == [s.temperature for s in SAMPLINGS]
    assert not any(s.penalises or s.logit_bias for s in unedited(SAMPLINGS))


def test_the_given_logits_are_not_modified():
    logits = torch.ones((B, 1, V))
    edited_without_sync(logits, SAMPLINGS, HISTORIES, None)
    assert torch.equal(logits, torch.ones((B, 1, V)))
