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
from draftproof.engine.device_round import DeviceRounds
from draftproof.models.cuda_graphs import CapturedGraphs, GraphCache
from draftproof.models.head.attach_published import fitted_eagle3
from draftproof.models.head.network import FittedHead
from draftproof.models.hf import HFModel
from draftproof.rules.device_verify import DeviceVerification
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import IDS, published, trained
from g_test import g_test

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
    "published head": lambda model: HeadDrafter(fitted_eagle3(published(), model)),
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
    step, read, found, late = batches.Scheduler.step, AsyncCopy.read, [], []

    def timed_read(copy):
        late.append(not copy._arrived.query())
        return read(copy)

    def counted(scheduler):
        late.clear()
        with no_syncs():
            rows = step(scheduler)
        found.append(sum(late))
        return rows

    monkeypatch.setattr(AsyncCopy, "read", timed_read)
    monkeypatch.setattr(batches.Scheduler, "step", counted)
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


LAW = [S(), S(temperature=0.6), S(temperature=1.3, top_k=6, top_p=0.95, min_p=0.02)]
TEXTS, ALPHA = 9_000, 1e-6
"""Texts of three tokens, a third with each sampling: total variations of 0.14, spread evenly, are found with power 0.9.
The same rounds are examined with more texts without a GPU (test_device_round.py)."""


def sampled(rule, drafter="model", dtype=torch.float32):
    """Sample texts whose first three tokens come from rounds that stay on the device."""
    model = llama.__wrapped__().to("cuda", dtype)
    engine = dp.load(model, drafter_of(drafter, model), rule=rule, num_draft_tokens=3, max_batch=256)
    return [sample_texts(engine, PROMPT, [sampling], TEXTS // len(LAW), length=3, budget=9) for sampling in LAW]


def p_values(found):
    laws = [joint_distribution(llama(), PROMPT, sampling, 3) for sampling in LAW]
    return [g_test(counts(each.texts, V), law) for each, law in zip(found, laws, strict=True)]


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", ["model", "head", "published head"])
def test_rounds_that_stay_on_the_device_give_the_target_s_distribution(name, rule, monkeypatch):
    launched, launch = [], DeviceRounds.launch
    monkeypatch.setattr(DeviceRounds, "launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    monkeypatch.setattr(batches, "advance", None)  # the host follows no round
    found = sampled(rule, name)
    assert all(each.drafting_mattered for each in found)
    assert len(launched) > 100
    assert min(p_values(found)) > ALPHA


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["head", "published head"])
def test_a_head_that_computes_in_bfloat16_leaves_the_distribution_as_it_is(name, monkeypatch):
    """The law is that of float32: what bfloat16 rounds in the target is far less than what is found."""
    monkeypatch.setattr(batches, "advance", None)  # the host follows no round
    found = sampled("block", name, torch.bfloat16)
    assert all(each.drafting_mattered for each in found)
    assert min(p_values(found)) > ALPHA


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["model", "head"])
def test_a_draft_verified_with_another_temperature_is_found(name, monkeypatch):
    """Control: verified as if it was drawn at half the temperature."""
    load = DeviceVerification.load
    monkeypatch.setattr(
        DeviceVerification,
        "load",
        lambda self, samplings, drawn, seeds: load(self, samplings, [t / 2 for t in drawn], seeds),
    )
    assert min(p_values(sampled("token", name))) < ALPHA


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", ["none", "model", "smaller vocabulary", "early exit", "head", "published head"])
def test_rounds_that_stay_on_the_device_give_the_texts_of_those_that_the_host_follows(name, rule, monkeypatch):
    samplings, launched, launch = [*MIXED, *FILTERED], [], DeviceRounds.launch
    monkeypatch.setattr(DeviceRounds, "launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    model = llama.__wrapped__().cuda()
    made, on_device = [], []
    for graphs in (True, False):
        made.append(texts(model, drafter_of(name, model), rule, samplings, 40, graphs=graphs))
        on_device.append(len(launched))
    assert made[0] == made[1]
    assert on_device[0] > 8
    assert on_device[1] == on_device[0]


def test_a_head_s_rounds_go_to_the_host_and_back():
    """A row with log-probabilities takes all rows along; the head goes on with what it had read on the device."""

    def mixed(graphs):
        model = llama.__wrapped__().cuda()
        engine = dp.load(model, OF_TARGET["head"](model), rule="block", num_draft_tokens=3, graphs=graphs)
        service = engine.service()
        first = service.submit(list(PROMPT), MIXED[0], max_tokens=40)
        second = service.submit(list(PROMPT), MIXED[2], max_tokens=6, logprobs=True)
        results = [first.result().tokens, second.result().tokens]
        service.close()
        return results

    assert mixed(True) == mixed(False)
