"""The engine on a GPU: it waits once a round, replays what it recorded, and says what it says on a CPU."""

from contextlib import contextmanager

import pytest
import torch

import draftproof as dp
from draftproof.core import host
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import batch as batches
from draftproof.models.hf import HFModel
from engine.tiny import PROMPT, llama, neighbour

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
S = dp.Sampling
MIXED = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(top_k=3, seed=5), S(top_p=0.8, min_p=0.05, seed=6)]
DRAFTERS = {
    "none": lambda: None,
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "model": lambda: neighbour.__wrapped__().cuda(),
    "smaller vocabulary": lambda: ModelDrafter(HFModel(neighbour.__wrapped__(6).cuda()), vocab_size=8),
    "early exit": lambda: "early-exit:1",
}


def texts(model, drafter, rule, samplings=MIXED, tokens=24, k=3):
    engine = dp.load(model, drafter, rule=rule, num_draft_tokens=k)
    outputs = engine.generate([list(PROMPT)] * len(samplings), samplings, max_tokens=tokens)
    return [output.tokens for output in outputs]


@contextmanager
def no_waiting(mode="error"):
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_waits_once(name, rule, monkeypatch):
    """Kernels are compiled and shapes recorded first: that may wait. Then nothing does but the one fetch."""
    model = llama.__wrapped__().cuda()
    drafter = DRAFTERS[name]()
    texts(model, drafter, rule)
    advance, read, waits, reads = batches.advance, host.Fetch.read, [], []

    def fetched(fetch):
        reads.append(not fetch._arrived.query())
        return read(fetch)

    def counted(*args):
        reads.clear()
        with no_waiting():
            rows = advance(*args)
        waits.append(sum(reads))
        return rows

    monkeypatch.setattr(host.Fetch, "read", fetched)
    monkeypatch.setattr(batches, "advance", counted)
    texts(model, drafter, rule)
    assert len(waits) > 4
    assert max(waits) <= 1


def test_the_device_tells_of_a_wait():
    numbers = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        bool(numbers.any())


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_says_what_it_says_on_a_cpu(name):
    """Greedy and seeded alike, in float32 over a vocabulary of 8: no two chances are near enough to differ."""
    on_host = DRAFTERS[name]() if name in ("none", "ngram", "suffix", "early exit") else neighbour()
    if name == "smaller vocabulary":
        on_host = ModelDrafter(HFModel(neighbour(6)), vocab_size=8)
    want = texts(llama(), on_host, "block")
    assert texts(llama.__wrapped__().cuda(), DRAFTERS[name](), "block") == want


def test_recorded_passes_say_the_same_as_launched_ones():
    model = llama.__wrapped__(max_length=1024).cuda()
    served, launched = HFModel(model), HFModel(model, graphs=False)
    prompts = [list(PROMPT), list(PROMPT) * 20, list(PROMPT)[:3]]
    said = []
    for one in (served, launched):
        engine = dp.load(one, "suffix", num_draft_tokens=3)
        said.append([o.tokens for o in engine.generate(prompts, [S(seed=i) for i in range(3)], max_tokens=200)])
    assert served.recorder.refusal is None
    assert said[0] == said[1]
