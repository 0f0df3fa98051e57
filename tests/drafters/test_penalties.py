"""A draft's penalties on a device are those of the host."""

import pytest
import torch

from draftproof.core import host
from draftproof.core.law import Vocab
from draftproof.core.sampling import Sampling, warp
from draftproof.core.types import History
from draftproof.drafters.penalties import edited, law_of, unedited

V, B = 12, 4
SAMPLINGS = [
    Sampling(repetition_penalty=1.3, temperature=0.7),
    Sampling(presence_penalty=0.4, frequency_penalty=0.3, logit_bias={2: 1.5, 11: -2.0}, top_k=5),
    Sampling(repetition_penalty=0.8, frequency_penalty=-0.2, temperature=0.0, logit_bias={0: -float("inf")}),
    Sampling(),
]
HISTORIES = [History([1, 2, 2], [3, 3, 3, 11]), History([0], [5, 5, 7]), History([4, 4], [4, 9]), History([1], [2])]


def on_device(history):
    return History(*(torch.tensor(part) for part in history))


@pytest.mark.parametrize("ids", [None, (7, 3, 0, 11, 5, 2)])
@pytest.mark.parametrize("J", [1, 3])
def test_laws_elsewhere_are_those_of_the_host(monkeypatch, ids, J):
    vocab = None if ids is None else Vocab.of(torch.tensor(ids), V)
    logits = torch.randn((B, J, V if ids is None else len(ids)), generator=torch.Generator().manual_seed(0)) * 3
    wanted = warp(logits, SAMPLINGS, HISTORIES, vocab=vocab)
    monkeypatch.setattr(host, "is_host", lambda device: False)
    made = law_of(logits, SAMPLINGS, [on_device(h) for h in HISTORIES], vocab)
    assert torch.equal(made.logits, wanted.logits)
    assert torch.equal(made.probs(), wanted.probs())


def test_without_the_penalties_it_would_be_another_law():
    """What the test above would not see must show here."""
    logits = torch.randn((B, 1, V), generator=torch.Generator().manual_seed(0)) * 3
    changed = (edited(logits, SAMPLINGS, HISTORIES, None) != logits).flatten(1).any(1)
    assert changed.tolist() == [True, True, True, False]
    assert [s.temperature for s in unedited(SAMPLINGS)] == [s.temperature for s in SAMPLINGS]
    assert not any(s.penalises or s.logit_bias for s in unedited(SAMPLINGS))


def test_the_logits_that_were_given_stay_as_they_are():
    logits = torch.ones((B, 1, V))
    edited(logits, SAMPLINGS, HISTORIES, None)
    assert torch.equal(logits, torch.ones((B, 1, V)))
