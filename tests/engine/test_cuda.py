"""The engine on a GPU: one sync per round, replayed CUDA graphs, and the same texts as on a CPU."""

from contextlib import contextmanager

import pytest
import torch

import draftproof as dp
from draftproof.core.device import AsyncCopy
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.engine import scheduler as batches
from draftproof.models.cuda_graphs import CapturedGraphs, GraphCache
from draftproof.models.head.network import FittedHead
from draftproof.models.hf import HFModel
from engine.tiny import PROMPT, llama, neighbour
from engine.tiny_heads import IDS, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
S = dp.SamplingParams
MIXED = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(seed=5), S(temperature=0.5, seed=6)]
FILTERED = [S(top_k=3, seed=5), S(temperature=0.0, seed=4), S(top_p=0.8, min_p=0.05, seed=6)]
"""Tested separately: their kernels take long to compile."""
DRAFTERS = {
    "none": lambda: None,
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "model": lambda: neighbour.__wrapped__().cuda(),
    "smaller vocabulary": lambda: ModelDrafter(HFModel(neighbour.__wrapped__(6).cuda()), vocab_size=8),
    "early exit": lambda: "early-exit:1",
}
OF_TARGET = {
    "head": lambda model: HeadDrafter(FittedHead.on(trained(), torch.tensor(IDS[:6]), model)),
    "suffix+head": lambda model: Switch(Suffix(), OF_TARGET["head"](model), enough=3),
}
EDITED = [S(repetition_penalty=1.2, seed=3), S(temperature=0.0, presence_penalty=0.3, seed=4), S(logit_bias={2: 1.0})]


def drafter_of(name, model):
    return DRAFTERS[name]() if name in DRAFTERS else OF_TARGET[name](model)


def texts(model, drafter, rule, samplings=MIXED, tokens=24, k=3, *, graphs=True, **asked):
    engine = dp.load(model, drafter, rule=rule, num_draft_tokens=k, graphs=graphs)
    outputs = engine.generate([list(PROMPT)] * len(samplings), samplings, max_tokens=tokens, **asked)
    return [output.tokens for output in outputs]


@contextmanager
def no_syncs(mode="error"):
    """Make every sync an error."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def waits(monkeypatch):
    """Count for each round the copies to the CPU that it had to wait for. Any other sync in a round is an error."""
    advance, read, found, late = batches.advance, AsyncCopy.read, [], []

    def timed_read(copy):
        late.append(not copy._arrived.query())
        return read(copy)

    def counted(*args):
        late.clear()
        with no_syncs():
            rows = advance(*args)
        found.append(sum(late))
        return rows

    monkeypatch.setattr(AsyncCopy, "read", timed_read)
    monkeypatch.setattr(batches, "advance", counted)
    return found


@contextmanager
def syncs_allowed(monkeypatch):
    """Allow syncs while kernels are compiled and graphs captured."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
        yield


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", [*DRAFTERS, *OF_TARGET])
def test_a_round_synchronises_once(name, rule, waits, monkeypatch):
    model = llama.__wrapped__().cuda()
    drafter = drafter_of(name, model)
    with syncs_allowed(monkeypatch):
        texts(model, drafter, rule)
    waits.clear()
    texts(model, drafter, rule)
    assert len(waits) > 4
    assert max(waits) <= 1


@pytest.mark.parametrize("name", ["ngram", "model", "head"])
def test_log_probabilities_penalties_and_filters_cost_no_further_sync(name, waits, monkeypatch):
    model = llama.__wrapped__().cuda()
    drafter = drafter_of(name, model)
    for samplings, asked in ((MIXED, {"logprobs": True}), (EDITED, {}), (FILTERED, {})):
        with syncs_allowed(monkeypatch):
            texts(model, drafter, "block", samplings, **asked)
        waits.clear()
        texts(model, drafter, "block", samplings, **asked)
        assert max(waits) <= 1


TREES = {
    "ngram": lambda model: NGram(branches=2, fillers=2),
    "suffix": lambda model: Suffix(branches=2),
    "model": lambda model: ModelDrafter(HFModel(neighbour.__wrapped__().to(model.device)), branches=2),
    "chain": lambda model: ModelDrafter(HFModel(neighbour.__wrapped__().to(model.device))),
    "head": lambda model: HeadDrafter(FittedHead.on(trained(), torch.tensor(IDS[:6]), model), branches=2),
    "suffix+head": lambda model: Switch(Suffix(branches=2), TREES["head"](model), enough=3),
}


@pytest.mark.parametrize("name", TREES)
def test_a_round_of_trees_synchronises_once(name, waits, monkeypatch):
    """Trees are copied, drawn, or grown from the likeliest paths; with log-probabilities and penalties too."""
    model = llama.__wrapped__().cuda()
    drafter = TREES[name](model)
    for samplings, asked in ((MIXED, {}), ([S(temperature=0.0)] * 2, {}), (MIXED, {"logprobs": True}), (EDITED, {})):
        with syncs_allowed(monkeypatch):
            texts(model, drafter, "tree", samplings, k=5, **asked)
        waits.clear()
        texts(model, drafter, "tree", samplings, k=5, **asked)
        assert len(waits) > 2
        assert max(waits) <= 1


@pytest.mark.parametrize("name", ["ngram", "suffix", "model", "chain"])
def test_trees_give_the_same_texts_as_on_a_cpu(name):
    """A GPU goes slot by slot, a CPU depth first. With a vocabulary of 8 no coin falls between their roundings.

    Heads are left out: on the CPU their weights are packed, and they draft differently.
    """
    want = texts(llama(), TREES[name](llama()), "tree", k=5)
    model = llama.__wrapped__().cuda()
    assert texts(model, TREES[name](model), "tree", k=5) == want


def test_the_device_reports_a_sync():
    numbers = torch.ones(3, device="cuda")
    with no_syncs(), pytest.raises(RuntimeError, match="synchroniz"):
        bool(numbers.any())


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_the_same_as_on_a_cpu(name):
    """Greedy and seeded, in float32. With a vocabulary of 8 no coin falls between the two roundings."""
    on_cpu = DRAFTERS[name]() if name in ("none", "ngram", "suffix", "early exit") else neighbour()
    if name == "smaller vocabulary":
        on_cpu = ModelDrafter(HFModel(neighbour(6)), vocab_size=8)
    samplings = [*MIXED, *FILTERED]
    want = texts(llama(), on_cpu, "block", samplings)
    assert texts(llama.__wrapped__().cuda(), DRAFTERS[name](), "block", samplings) == want


def test_captured_passes_give_the_same_texts_as_launched_ones():
    model = llama.__wrapped__(max_length=1024).cuda()
    served, launched = HFModel(model), HFModel(model, graphs=False)
    prompts = [list(PROMPT), list(PROMPT) * 20, list(PROMPT)[:3]]
    made = []
    for one in (served, launched):
        engine = dp.load(one, "suffix", num_draft_tokens=3)
        made.append([o.tokens for o in engine.generate(prompts, [S(seed=i) for i in range(3)], max_tokens=200)])
    assert served.graph_cache.refusal is None
    assert made[0] == made[1]


@pytest.mark.parametrize("rule", ["block", "tree"])
def test_captured_heads_give_the_same_texts_as_launched_ones(rule):
    model = llama.__wrapped__().cuda()
    branches = 2 if rule == "tree" else 1
    fitted = FittedHead.on(trained(), torch.tensor(IDS[:6]), model)
    made = [
        texts(model, HeadDrafter(fitted, branches=branches, graphs=graphs), rule, tokens=40, graphs=graphs)
        for graphs in (True, False)
    ]
    assert made[0] == made[1]


def passes(graph_cache, body, times=5):
    kept = CapturedGraphs()
    inputs = torch.ones((1, 2), dtype=torch.long, device="cuda"), torch.ones(1, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        return [graph_cache.run(body, inputs, 256, kept)[0].tolist() for _ in range(times)]


@pytest.mark.parametrize(
    "does",
    [
        lambda tokens: bool(tokens.any()),
        lambda tokens: 1 / (not torch.cuda.is_current_stream_capturing()),
        lambda tokens: torch.tensor([1], device="cuda"),
    ],
    ids=["reads", "fails", "copies"],
)
def test_a_pass_that_cannot_be_captured_is_launched_and_leaves_the_device_usable(does):
    def body(tokens, lengths):
        does(tokens)
        return (tokens + lengths,)

    graph_cache = GraphCache()
    with pytest.warns(UserWarning, match="cannot be recorded"):
        assert passes(graph_cache, body) == [[[2, 2]]] * 5
    assert graph_cache.refusal is not None
    assert torch.rand(3, device="cuda").sum().item() > 0
    sound = GraphCache()
    assert passes(sound, lambda tokens, lengths: (tokens * lengths,)) == [[[1, 1]]] * 5
    assert sound.refusal is None


def test_graphs_captured_elsewhere_outside_of_inference_mode_still_work():
    assert passes(GraphCache(), lambda tokens, lengths: (tokens - lengths,)) == [[[0, 0]]] * 5
    numbers, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    numbers * 2
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        twice = numbers * 2
    numbers.fill_(3.0)
    graph.replay()
    assert twice.tolist() == [6.0] * 4


def test_memory_is_freed_with_its_engine():
    model = llama.__wrapped__(max_length=1024).cuda()
    texts(model, "suffix", "block", tokens=40)  # warm-up: torch keeps workspaces for its libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        texts(model, "suffix", "block", tokens=40)
    assert torch.cuda.memory_allocated() <= before + 2**20
