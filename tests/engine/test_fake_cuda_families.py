"""Passes of transformers' families on a fake GPU: none synchronises, so that all can be captured."""

import copy

import pytest
import torch

from draftproof.models.cuda_graphs import WARMUP_PASSES
from draftproof.models.hf import HFModel
from engine.fake_cuda import fake_cuda, to_fake_cuda
from models.families import CONFIGS, family

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
QUICK = ("llama", "gemma3", "bloom")
OTHERS = [name for name in CONFIGS if name not in QUICK and not name.startswith("falcon")]
FALCONS = [name for name in CONFIGS if name.startswith("falcon")]


def passes(monkeypatch, name):
    model = copy.deepcopy(family(name))
    with fake_cuda(monkeypatch) as device:
        served = HFModel(to_fake_cuda(model))
        cache = served.new_cache(2)
        tokens = torch.ones((2, 5), dtype=torch.long, device=served.device)
        served(tokens, cache, scored=1)
        cache.keep(torch.tensor([5, 3]))
        device.syncs.clear()
        for _ in range(WARMUP_PASSES + 2):
            served(tokens[:, :3], cache)
            cache.keep(torch.tensor([1, 2]))
    return device


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_passes_of_every_family_but_falcon_can_be_captured(monkeypatch, name):
    device = passes(monkeypatch, name)
    assert (device.syncs, device.recorded) == ([], 1)


@pytest.mark.parametrize("name", FALCONS)
def test_passes_of_falcon_are_launched(monkeypatch, name):
    """transformers' Falcon indexes by a list: on a GPU the rehearsal of the capture fails, and passes are launched."""
    with pytest.raises(AssertionError, match="indexing by values on the CPU synchronises"):
        passes(monkeypatch, name)
