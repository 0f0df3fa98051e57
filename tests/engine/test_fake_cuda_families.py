"""Passes of transformers' families on a GPU that is not there: none waits for it, so that all can be recorded."""

import copy

import pytest
import torch

from draftproof.models.cuda_graphs import TIMES
from draftproof.models.hf import HFModel
from engine.fake_cuda import moved, there
from models.families import CONFIGS, family

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
FEW = ("llama", "gemma3", "bloom")
OTHERS = [name for name in CONFIGS if name not in FEW and not name.startswith("falcon")]
FALCONS = [name for name in CONFIGS if name.startswith("falcon")]


def passes(monkeypatch, name):
    model = copy.deepcopy(family(name))
    with there(monkeypatch) as device:
        served = HFModel(moved(model))
        cache = served.new_cache(2)
        tokens = torch.ones((2, 5), dtype=torch.long, device=served.device)
        served(tokens, cache, scored=1)
        cache.keep(torch.tensor([5, 3]))
        device.waits.clear()
        for _ in range(TIMES + 2):
            served(tokens[:, :3], cache)
            cache.keep(torch.tensor([1, 2]))
    return device


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_passes_of_every_family_can_be_recorded(monkeypatch, name):
    device = passes(monkeypatch, name)
    assert (device.waits, device.recorded) == ([], 1)


@pytest.mark.parametrize("name", FALCONS)
def test_but_falcon_s(monkeypatch, name):
    """transformers' own pass indexes by a list there: on a GPU its rehearsal fails, and it is launched."""
    with pytest.raises(AssertionError, match="indexing by the host's numbers waits"):
        passes(monkeypatch, name)
