"""Captured passes give the texts of launched ones, for targets, drafters, heads and trees, in a changing batch."""

import pytest
import torch

import draftproof as dp
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.engine.draft_length import Costs
from draftproof.models import compatibility
from draftproof.models.cuda_graphs import WARMUP_PASSES, CapturedGraphs
from draftproof.models.hf import HFModel
from engine.fake_graphs import FakeGraphs
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import on_target

S = dp.SamplingParams
MIXED = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(top_k=3, seed=5), S(top_p=0.8, seed=6)]
PROMPTS = [list(PROMPT), list(PROMPT)[:3], list(PROMPT)[:7], [1]]
BUDGETS = [40, 21, 40, 33]
DRAFTERS = {
    "none": ("block", lambda: None),
    "ngram": ("block", lambda: "ngram"),
    "model": ("block", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V)),
    "coupled": ("coupled", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V)),
    "early exit": ("token", lambda: "early-exit:1"),
    "head": ("block", lambda: HeadDrafter(on_target(6))),
    "ngram tree": ("tree", lambda: NGram(branches=2)),
    "head tree": ("tree", lambda: HeadDrafter(on_target(6), branches=2)),
}


def texts(name):
    rule, make = DRAFTERS[name]
    engine = dp.load(llama(), make(), rule=rule, num_draft_tokens=3, max_batch=3)
    outputs = engine.generate(PROMPTS, MIXED, max_tokens=BUDGETS)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("name", DRAFTERS)
def test_captured_passes_give_the_texts_of_launched_ones(monkeypatch, name):
    wanted = texts(name)
    graphs = FakeGraphs(monkeypatch)
    assert texts(name) == wanted
    assert graphs.recorded >= 1
    assert graphs.replayed > 10


@pytest.mark.parametrize("name", ["none", "model", "ngram tree"])
def test_rectangular_passes_give_the_texts_of_launched_ones(monkeypatch, name):
    wanted = texts(name)
    graphs = FakeGraphs(monkeypatch, pooled=False)
    assert texts(name) == wanted
    assert graphs.recorded >= 2
    assert graphs.replayed > 10


def long_text():
    """Generate a text that grows its buffers, which hold 256 tokens at first."""
    engine = dp.load(llama(max_length=1024), "ngram", num_draft_tokens=3)
    return engine.generate([list(PROMPT) * 25], temperature=0, max_tokens=40)[0].tokens


def test_graphs_are_captured_anew_when_rectangular_buffers_grow(monkeypatch):
    wanted = long_text()
    graphs = FakeGraphs(monkeypatch, pooled=False)
    assert long_text() == wanted
    assert graphs.recorded >= 2


def test_over_a_pool_one_recording_serves_a_growing_text(monkeypatch):
    wanted = long_text()
    graphs = FakeGraphs(monkeypatch)
    assert long_text() == wanted
    assert graphs.recorded == 1


def test_over_a_pool_rows_come_and_go_without_a_new_recording(monkeypatch):
    """Of one, two and three rows: a recording each, however many requests there are and however long they are."""
    graphs = FakeGraphs(monkeypatch)
    engine = dp.load(llama(max_length=1024), None, max_batch=3)
    engine.generate(PROMPTS * 4, [S(seed=i) for i in range(16)], max_tokens=[9, 30, 17, 40] * 4)
    assert graphs.recorded == 3


def test_rounds_that_record_do_not_count_as_what_a_round_costs(monkeypatch):
    """They take many times as long, and automatic draft lengths would give up on a drafter that pays."""
    FakeGraphs(monkeypatch)
    engine = dp.load(llama(), None)
    times = []
    monkeypatch.setattr(Costs, "update", lambda *args: times.append(args))
    rounds = engine.generate([list(PROMPT)], temperature=0, max_tokens=20)[0].stats.rounds
    assert len(times) == rounds - WARMUP_PASSES - 1


def passes_around_growth():
    """Return the logits of one repeated pass; before the last one the buffers grow, but its attention span does not."""
    served, token = HFModel(llama(max_length=1024)), torch.tensor([[5]])
    cache = served.new_cache(1)
    served(torch.tensor([PROMPT]), cache)
    cache.keep(torch.tensor([len(PROMPT)]))
    before = [served(token, cache).logits for _ in range(WARMUP_PASSES + 2)]
    cache._grow(600)
    return [*before, served(token, cache).logits]


def test_graphs_are_dropped_with_their_buffers(monkeypatch):
    graphs = FakeGraphs(monkeypatch, pooled=False)
    first, *others = passes_around_growth()
    assert all(torch.equal(first, other) for other in others)
    assert graphs.recorded == 2
    monkeypatch.setattr(CapturedGraphs, "forget", lambda recordings: None)
    with pytest.raises(AssertionError, match="the recorded memory, and no other"):
        passes_around_growth()


def test_a_rebound_length_is_detected(monkeypatch):
    FakeGraphs(monkeypatch, pooled=False)
    right = HFModel._logits_and_states

    def rebinding(self, tokens, lengths, **options):
        return right(self, tokens, options["cache"].lengths, **options)

    monkeypatch.setattr(HFModel, "_logits_and_states", rebinding)
    with pytest.raises(AssertionError, match="the recorded memory, and no other"):
        long_text()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float64}, "the model is in torch.float64"),
        ({"head_dim": 320}, "serves heads of up to 256 numbers, and the model has 320"),
    ],
)
def test_what_the_attention_kernel_does_not_serve_is_rectangular(monkeypatch, changed, reason):
    FakeGraphs(monkeypatch)
    model = llama.__wrapped__()
    if "dtype" in changed:
        model = model.double()
    else:
        model.config.head_dim = changed["head_dim"]
    assert reason in compatibility.packing_refusal(model)
