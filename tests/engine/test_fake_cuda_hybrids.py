"""Passes and rollbacks of hybrid models on a fake GPU: our part of them does not synchronise."""

import copy

import pytest
import torch

from draftproof.models import hybrid as hybrids
from draftproof.models import hybrid_cache
from draftproof.models.hybrid import HybridModel
from engine.fake_cuda import fake_cuda, to_fake_cuda
from models.hybrid_families import QUICK, hybrid

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize("name", QUICK)
def test_passes_and_rollbacks_do_not_synchronise(monkeypatch, name):
    model = copy.deepcopy(hybrid(name))
    monkeypatch.setattr(hybrids, "probe_causality", lambda *_: None)  # a probe needs real values
    monkeypatch.setattr(hybrids, "probe_recurrence", lambda *_: None)
    monkeypatch.setattr(hybrid_cache, "same_states", lambda *_: True)
    with fake_cuda(monkeypatch) as device:
        served = HybridModel(to_fake_cuda(model))
        cache = served.new_cache(2)
        tokens = torch.ones((2, 5), dtype=torch.long, device=served.device)
        served(tokens, cache, scored=1)
        cache.keep(torch.tensor([5, 5]))
        device.syncs.clear()
        for counts in ([1, 2], [0, 3], [2, 2], [3, 3]):
            served(tokens[:, :3], cache)
            cache.keep(torch.tensor(counts))
        served(tokens[:, :1], cache)
        cache.keep(torch.tensor([0, 1]))
        cache = cache.take([1]).join(cache.take([0]))
        served(tokens, cache)
    assert device.syncs == []
