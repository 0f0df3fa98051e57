"""A round on a GPU synchronises once: counted here without a GPU, and on a real one in test_cuda.py."""

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.engine import scheduler as batches
from draftproof.models.hf import HFModel
from engine.count_syncs import SyncCounter
from engine.tiny import PROMPT, llama, neighbour
from engine.tiny_heads import on_target

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counted where Triton's interpreter runs"),
]
S = dp.SamplingParams
DRAFTERS = {
    "none": lambda: None,
    "ngram": lambda: "ngram",
    "fillers": lambda: NGram(fillers=2),
    "suffix": lambda: "suffix",
    "model": lambda: neighbour(),
    "smaller vocabulary": lambda: ModelDrafter(HFModel(neighbour(6)), vocab_size=8),
    "confident model": lambda: ModelDrafter(HFModel(neighbour()), vocab_size=8, confidence=0.3),
    "early exit": lambda: "early-exit:1",
    "head": lambda: HeadDrafter(on_target(6)),
    "suffix+head": lambda: Switch(Suffix(), HeadDrafter(on_target(6)), enough=3),
}
WARM = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(temperature=0.9, min_p=0.05, seed=5)]


def rounds(monkeypatch, drafter, rule, samplings, tokens=4, k=2, **asked):
    """Return (reads of values, waits for a copy) of every round, and the texts."""
    counter, found = SyncCounter(), []
    step = batches.Scheduler.step
    counter.install(monkeypatch)

    def counted(scheduler):
        reads, waits = len(counter.reads), counter.waits
        with counter:
            rows = step(scheduler)
        if rows:  # not while prompts are read, or before the first results of rounds that stay on the device
            found.append((counter.reads[reads:], counter.waits - waits))
        return rows

    monkeypatch.setattr(batches.Scheduler, "step", counted)
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=k)
    outputs = engine.generate([list(PROMPT)] * len(samplings), samplings, max_tokens=tokens, **asked)
    monkeypatch.undo()
    return found, tokens_and_logprobs(outputs)


def tokens_and_logprobs(outputs):
    """Return log-probabilities comparable up to rounding: on a GPU a pass attends to whole buckets of slots."""
    raw_and_drawn = [[number for t in output.logprobs or () for number in (t.logprob, t.drawn)] for output in outputs]
    asked = [pytest.approx(numbers, abs=1e-5) if numbers else None for numbers in raw_and_drawn]
    return [(output.tokens, logprobs) for output, logprobs in zip(outputs, asked, strict=True)]


def on_cpu(drafter, rule, samplings, tokens=4, k=2, **asked):
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=k)
    return tokens_and_logprobs(engine.generate([list(PROMPT)] * len(samplings), samplings, max_tokens=tokens, **asked))


SHORT = ("none", "fillers", "model", "head")  # those that differ most; the interpreter is slow
NAMES = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in DRAFTERS]


@pytest.mark.parametrize("name", NAMES)
def test_a_round_synchronises_once_and_gives_the_same_texts(monkeypatch, name):
    found, texts = rounds(monkeypatch, DRAFTERS[name](), "block", WARM)
    assert len(found) > 1
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(DRAFTERS[name](), "block", WARM)


@pytest.mark.parametrize("rule", budgeted(["token", "coupled"], ["coupled"]))
def test_under_the_other_rules_too(monkeypatch, rule):
    found, texts = rounds(monkeypatch, neighbour(), rule, WARM, tokens=4)
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(neighbour(), rule, WARM, tokens=4)


TREES = {
    "ngram": lambda: NGram(branches=2, fillers=2),
    "suffix": lambda: Suffix(branches=2),
    "model": lambda: ModelDrafter(HFModel(neighbour()), branches=2),
    "smaller vocabulary": lambda: ModelDrafter(HFModel(neighbour(6)), vocab_size=8, branches=2),
    "head": lambda: HeadDrafter(on_target(6), branches=2),
    "suffix+head": lambda: Switch(Suffix(branches=2), HeadDrafter(on_target(6), branches=2), enough=3),
    "chain": lambda: neighbour(),
}
COLD = [S(temperature=0.0, seed=4)] * 2
SHORT_TREES = [("ngram", "warm"), ("suffix+head", "warm"), ("head", "greedy")]
TREE_CASES = [(name, samplings) for name in TREES for samplings in ("warm", "greedy")]


@pytest.mark.parametrize(
    ("name", "samplings"), [pytest.param(*c, marks=[] if c in SHORT_TREES else [pytest.mark.slow]) for c in TREE_CASES]
)
def test_a_tree_is_verified_without_a_read_and_as_on_the_cpu(monkeypatch, name, samplings):
    """A GPU goes slot by slot, a CPU depth first: the texts are the same."""
    asked = (
        {"samplings": WARM, "tokens": 8, "k": 4} if samplings == "warm" else {"samplings": COLD, "tokens": 24, "k": 5}
    )
    found, texts = rounds(monkeypatch, TREES[name](), "tree", **asked)
    assert len(found) > 2
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(TREES[name](), "tree", **asked)


@pytest.mark.parametrize("name", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
def test_a_tree_is_verified_with_penalties_and_bias_without_a_read(monkeypatch, name):
    edited = [S(repetition_penalty=1.3, presence_penalty=0.2, seed=1), S(logit_bias={2: 1.0}, seed=2)]
    found, texts = rounds(monkeypatch, TREES[name](), "tree", edited, tokens=6, k=4)
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(TREES[name](), "tree", edited, tokens=6, k=4)


class Misplacing(NGram):
    """Drafts a tree with a slot that is its own parent, in the second row."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if len(contexts) == 2:
            draft.parents[1, 1] = 1
        return draft


def test_a_misplaced_slot_fails_its_request_alone_and_is_named_as_on_the_cpu(monkeypatch):
    """The fault is found in the round's one copy; describing it costs one more sync."""

    def outputs():
        engine = dp.load(llama(), Misplacing(branches=2, fillers=3), rule="tree", num_draft_tokens=4)
        return engine.generate([list(PROMPT)] * 2, WARM[:2], max_tokens=8)

    wanted = outputs()
    SyncCounter().install(monkeypatch)
    for one, other in (wanted, outputs()):
        assert (one.finish_reason, len(one.tokens)) == ("length", 8)
        assert other.finish_reason == "error"
        assert "drafter Misplacing proposed parents" in other.error


@pytest.mark.parametrize(
    "sampling",
    budgeted([S(top_k=3, seed=1), S(top_p=0.8, seed=1), S(min_p=0.1, seed=1)], ["top-k"], ["top-k", "top-p", "min-p"]),
)
def test_filters_are_drafted_with_and_verified_without_a_read(monkeypatch, sampling):
    found, texts = rounds(monkeypatch, neighbour(), "token", [sampling], tokens=3)
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(neighbour(), "token", [sampling], tokens=3)


@pytest.mark.parametrize("name", ["fillers", "head"])
def test_log_probabilities_are_right_and_come_in_the_same_copy(monkeypatch, name):
    found, texts = rounds(monkeypatch, DRAFTERS[name](), "block", WARM[:2], logprobs=True)
    assert found == [([], 1)] * len(found)
    wanted = on_cpu(DRAFTERS[name](), "block", WARM[:2], logprobs=True)
    assert [tokens for tokens, _ in texts] == [tokens for tokens, _ in wanted]
    assert [logprobs.expected for _, logprobs in texts] == [logprobs for _, logprobs in wanted]


@pytest.mark.parametrize("name", ["model", "head"])
def test_penalties_and_bias_are_drafted_with_without_a_read(monkeypatch, name):
    edited = [S(repetition_penalty=1.3, presence_penalty=0.2, seed=1), S(logit_bias={2: 1.0}, seed=2)]
    found, texts = rounds(monkeypatch, DRAFTERS[name](), "block", edited, tokens=3)
    assert found == [([], 1)] * len(found)
    assert texts == on_cpu(DRAFTERS[name](), "block", edited, tokens=3)


def test_a_grammar_synchronises_once_more(monkeypatch):
    grammar = {"allowed": lambda text: torch.arange(8) != len(text) % 8}
    found, texts = rounds(monkeypatch, neighbour(), "block", WARM[:1], tokens=3, **grammar)
    assert found == [([], 2)] * len(found)
    assert texts == on_cpu(neighbour(), "block", WARM[:1], tokens=3, **grammar)


def test_the_counter_finds_a_sync(monkeypatch):
    class Reading(NGram):
        def propose(self, contexts, k, rng):
            draft = super().propose(contexts, k, rng)
            return draft if bool((draft.lengths >= 0).all()) and draft.tokens.tolist() is not None else None

    found, _ = rounds(monkeypatch, Reading(), "block", WARM[:1], tokens=2)
    assert found[0] == (["is_nonzero", "tolist"], 1)


def test_a_row_without_a_distribution_fails_alone_by_the_reference(monkeypatch):
    """The kernels flag NaN in one row, and the reference says what it is; the other row continues."""
    model = llama()
    right_pass = HFModel.device_pass

    def broken(self, tokens, places, *args, **options):
        out = right_pass(self, tokens, places, *args, **options)
        if len(tokens) == 2 and int(places[1, 0]) > len(PROMPT):
            out.logits[0, :, 0] = torch.nan
        return out

    monkeypatch.setattr(HFModel, "device_pass", broken)
    SyncCounter().install(monkeypatch)
    engine = dp.load(model, "ngram", num_draft_tokens=2)
    one, other = engine.generate([list(PROMPT)] * 2, [S(seed=1), S(seed=2)], max_tokens=4)
    assert one.finish_reason == "error"
    assert "are not a distribution" in one.error
    assert (other.finish_reason, len(other.tokens)) == ("length", 4)
