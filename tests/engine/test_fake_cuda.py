"""Rounds on a fake GPU (fake_cuda.py): CPU tensors are never mixed in, and nothing synchronises but one copy."""

import pytest
import torch

import draftproof as dp
from auditor.two_tokenizers import word_level
from draftproof.core.device import AsyncCopy
from draftproof.core.distribution import DraftVocab
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.drafters.tli import TLI
from draftproof.engine import device_round
from draftproof.engine import round as rounds_module
from draftproof.engine import scheduler as batches
from draftproof.models.head.attach import dtype_on
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.taps import embeddings, shape_for
from draftproof.models.hf import HFModel
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from engine.fake_cuda import fake_cuda, to_fake_cuda
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import IDS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU; with one: test_cuda.py")
S = dp.SamplingParams
WARM = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(temperature=0.9, top_p=0.9, seed=5)]
GREEDY = [S(temperature=0.0, seed=4)] * 3
EDITED = [S(temperature=0.8, seed=3, repetition_penalty=1.2), S(temperature=0.0, presence_penalty=0.3, seed=4)]
EDITED += [S(logit_bias={1: 2.0, 3: -1.0}, seed=5)]
ALL = {"warm": WARM, "greedy": GREEDY, "edited": EDITED}


def head_of(model, **settings):
    head, ids = Head(shape_for(model), seed=1), torch.tensor(IDS[:6]).to(model.device)
    rows, dtype = torch.nn.Linear(head.shape.hidden, len(ids), bias=False), dtype_on(model)
    for weight in (*head.parameters(), *rows.parameters()):
        weight.data = weight.data.to(dtype)
    fitted = FittedHead(to_fake_cuda(head), embeddings(model), to_fake_cuda(rows), DraftVocab.of(ids, V), dtype)
    return HeadDrafter(fitted, **settings)


def served(size=V):
    return HFModel(to_fake_cuda(neighbour.__wrapped__(size)))


def two_vocabularies():
    """Match two vocabularies of V words, of which five are shared, in another order."""
    own, other = word_level(*"abcdefg"), word_level(*"xycabze")
    return VocabularyOverlap.of(own, other, vocab_size=V, draft_vocab_size=V)


DRAFTERS = {
    "none": lambda model: None,
    "ngram": lambda model: "ngram",
    "fillers": lambda model: NGram(fillers=2),
    "suffix": lambda model: "suffix",
    "head": head_of,
    "confident head": lambda model: head_of(model, confidence=0.3),
    "suffix+head": lambda model: Switch(Suffix(), head_of(model), enough=2),
    "model": lambda model: ModelDrafter(served()),
    "smaller vocabulary": lambda model: ModelDrafter(served(6), vocab_size=V),
    "confident model": lambda model: ModelDrafter(served(), confidence=0.3),
    "early exit": lambda model: "early-exit:1",
    "TLI": lambda model: TLI(served(), two_vocabularies(), vocab_size=V),
}
READS = ("model", "smaller vocabulary", "confident model", "early exit", "TLI")
"""Drafters that also copy what they drew to the CPU, and read it in the next round, when it has arrived."""


STAYS = ("model", "smaller vocabulary", "confident model", "early exit")
"""Drafters whose rounds stay on the device: one copy for all."""


def copies(name, *, followed=False):
    """Return how many tensors a round copies to the CPU; `followed`: the host follows every round."""
    return 2 if name in READS and (followed or name not in STAYS) else 1


class SoundRound(AsyncCopy):
    """What a round that stays on the device would have sent: one token, and no fault."""

    def read(self):
        numbers = super().read().copy()
        numbers[:, -1] = 0
        return numbers


def rounds(monkeypatch, make, rule="block", samplings=WARM, tokens=24, dtype=torch.float32, **asked):
    """Return (syncs, copies to the CPU) of each round, and the device."""
    step, fetched, found = batches.Scheduler.step, rounds_module._fetched, []

    def all_kept(parts):
        """Make up the numbers that a device would have sent: everything is kept, sound and without a fault."""
        numbers, J = fetched(parts).copy(), parts[0].shape[1]
        numbers[:, :J], numbers[:, J], numbers[:, J + 1], numbers[:, J + 2] = 1, J - 1, J, 0
        return numbers

    with fake_cuda(monkeypatch) as device:
        model = to_fake_cuda(llama.__wrapped__().to(dtype))
        drafter = make(model)

        def counted(scheduler):
            syncs, fetches = len(device.syncs), device.fetches
            rows = step(scheduler)
            if device.fetches > fetches:
                found.append((device.syncs[syncs:], device.fetches - fetches))
            return rows

        monkeypatch.setattr(batches.Scheduler, "step", counted)
        monkeypatch.setattr(rounds_module, "_fetched", all_kept)
        monkeypatch.setattr(device_round, "AsyncCopy", SoundRound)
        engine = dp.load(model, drafter, rule=rule, num_draft_tokens=3)
        prompts, budgets = [list(PROMPT), list(PROMPT)[:4], [1]], [tokens, tokens, 9]
        outputs = engine.generate(prompts, samplings, max_tokens=budgets, **asked)
    assert not [output.error for output in outputs if output.error]
    assert len(found) > 3
    return found, device


SHORT = [
    ("none", "warm"),
    ("fillers", "warm"),
    ("suffix+head", "warm"),
    ("model", "warm"),
    ("head", "edited"),
    ("TLI", "warm"),
]
LONG = [*((name, "warm") for name in DRAFTERS), *((n, s) for n in ("model", "head") for s in ("greedy", "edited"))]
CASES = [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG if case not in SHORT)]


@pytest.mark.parametrize(("name", "samplings"), CASES)
def test_a_round_waits_for_nothing_but_its_copy(monkeypatch, name, samplings):
    """Meanwhile rows finish, passes are captured and replayed, and heads receive the target's hidden states."""
    found, device = rounds(monkeypatch, DRAFTERS[name], samplings=ALL[samplings])
    assert found == [([], copies(name, followed=samplings == "edited"))] * len(found)
    assert device.recorded > 0


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("name", ["model", "head"])
def test_under_the_other_rules_too(monkeypatch, name, rule):
    found, _ = rounds(monkeypatch, DRAFTERS[name], rule)
    assert found == [([], copies(name))] * len(found)


@pytest.mark.parametrize("name", ["early exit", "head"])
def test_in_bfloat16_too(monkeypatch, name):
    found, device = rounds(monkeypatch, DRAFTERS[name], dtype=torch.bfloat16, logprobs=True)
    assert found == [([], copies(name, followed=True))] * len(found)
    assert device.recorded > 0


@pytest.mark.parametrize(
    ("make", "rule"),
    [(head_of, "block"), (head_of, "coupled"), (lambda model: head_of(model, confidence=0.3), "token")],
    ids=["block", "coupled", "confident"],
)
def test_a_head_computes_in_the_targets_bfloat16(monkeypatch, make, rule):
    """Rounds stay on the device: no state of another dtype may meet its weights. A tree's rounds are followed."""
    found, device = rounds(monkeypatch, make, rule, dtype=torch.bfloat16)
    assert found == [([], 1)] * len(found)
    assert device.recorded > 0
    found, _ = rounds(monkeypatch, TREES["head"], "tree", dtype=torch.bfloat16)
    assert found == [([], 1)] * len(found)


@pytest.mark.parametrize("samplings", ["warm", "edited"])
@pytest.mark.parametrize("name", ["ngram", "head"])
def test_log_probabilities_come_in_the_same_copy(monkeypatch, name, samplings):
    found, _ = rounds(monkeypatch, DRAFTERS[name], samplings=ALL[samplings], logprobs=True)
    assert found == [([], 1)] * len(found)


@pytest.mark.parametrize("name", ["ngram", "head"])
def test_a_grammar_costs_one_copy_more(monkeypatch, name):
    found, _ = rounds(monkeypatch, DRAFTERS[name], allowed=lambda text: torch.ones(V, dtype=torch.bool))
    assert found == [([], 2)] * len(found)


TREES = {
    "ngram": lambda model: NGram(branches=2, fillers=1),
    "suffix": lambda model: Suffix(branches=2),
    "model": lambda model: ModelDrafter(served(), branches=2),
    "smaller vocabulary": lambda model: ModelDrafter(served(6), vocab_size=V, branches=2),
    "confident model": lambda model: ModelDrafter(served(), branches=2, confidence=0.3),
    "head": lambda model: head_of(model, branches=2),
    "suffix+head": lambda model: Switch(Suffix(branches=2), head_of(model, branches=2), enough=2),
    "chain": lambda model: ModelDrafter(served()),
    "none": lambda model: None,
}
SHORT_TREES = [("suffix", "warm"), ("model", "warm"), ("head", "warm"), ("head", "greedy"), ("head", "edited")]
LONG_TREES = [(name, samplings) for name in TREES for samplings in ALL]
TREE_CASES = [*SHORT_TREES, *(pytest.param(*c, marks=pytest.mark.slow) for c in LONG_TREES if c not in SHORT_TREES)]


@pytest.mark.parametrize(("name", "samplings"), TREE_CASES)
def test_the_round_of_a_tree_waits_for_nothing_but_its_copy(monkeypatch, name, samplings):
    """Passes are captured with the parents as data; greedy trees and drawn ones share a batch."""
    found, device = rounds(monkeypatch, TREES[name], "tree", ALL[samplings])
    assert found == [([], 2 if name in (*READS, "chain") else 1)] * len(found)
    assert device.recorded > 0


@pytest.mark.parametrize("name", ["model", "head"])
def test_log_probabilities_of_a_tree_come_in_the_same_copy(monkeypatch, name):
    found, _ = rounds(monkeypatch, TREES[name], "tree", logprobs=True)
    assert found == [([], copies(name, followed=True))] * len(found)


class Misbehaving(NGram):
    """Calls `does` on every draft: it reads values, copies with blocking, or mixes in CPU tensors."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        self.does(draft)
        return draft


@pytest.mark.parametrize(
    ("does", "seen"),
    [
        (lambda draft: bool((draft.lengths > 0).any()), "__bool__"),
        (lambda draft: draft.lengths.tolist(), "item"),
        (lambda draft: torch.tensor([1], device=draft.tokens.device), "_to_copy"),
        (lambda draft: torch.ones(2).to(draft.tokens.device), "_to_copy"),
        (lambda draft: draft.lengths.copy_(torch.ones(len(draft.lengths), dtype=torch.long)), "copy_"),
    ],
)
def test_a_sync_is_detected(monkeypatch, does, seen):
    found, _ = rounds(monkeypatch, lambda model: Misbehaving(does))
    assert [syncs[0] for syncs, _ in found] == [seen] * len(found)


def test_mixing_in_a_cpu_tensor_is_refused(monkeypatch):
    with pytest.raises(Exception, match="two devices, cuda:0 and cpu"):
        rounds(monkeypatch, lambda model: Misbehaving(lambda draft: draft.lengths + torch.ones(len(draft.lengths))))


@pytest.mark.parametrize(
    "does",
    [
        lambda draft: draft.tokens[draft.tokens > 0],
        lambda draft: draft.tokens.__setitem__(draft.tokens > 0, torch.ones_like(draft.tokens[0, 0])),
    ],
    ids=["read", "written"],
)
def test_indexing_by_a_mask_is_refused(monkeypatch, does):
    with pytest.raises(AssertionError, match="indexing by a mask synchronises"):
        rounds(monkeypatch, lambda model: Misbehaving(does))
