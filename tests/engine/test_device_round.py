"""Rounds that stay on the device give the texts of rounds that the host follows, in a changing batch."""

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.drafters.device_draft import DeviceDrafting
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import device_round
from draftproof.engine import scheduler as schedulers
from draftproof.engine.device_round import DeviceRounds
from draftproof.models.hf import HFModel
from draftproof.rules.device_verify import DeviceVerification
from engine import reference_kernels
from engine.fake_graphs import FakeGraphs
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from g_test import g_test

S = dp.SamplingParams
MIXED = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4), S(seed=5), S(temperature=0.6, seed=6)]
FILTERED = [S(temperature=0.8, top_k=3, seed=3), S(temperature=0.0, seed=4), S(top_p=0.8, seed=6)]
LONG = [S(temperature=0.8, seed=3), S(temperature=0.0, seed=4)]
PROMPTS = [list(PROMPT), list(PROMPT)[:3], list(PROMPT)[:7], [1]]
BUDGETS = [30, 13, 22, 9]
CASES = {
    "plain": ("block", lambda: None),
    "block": ("block", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V)),
    "token": ("token", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V)),
    "coupled": ("coupled", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V)),
    "a warmer drafter": ("block", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V, temperature=1.3)),
    "a smaller vocabulary": ("block", lambda: ModelDrafter(HFModel(neighbour(6)), vocab_size=V)),
    "confidence": ("block", lambda: ModelDrafter(HFModel(neighbour()), vocab_size=V, confidence=0.4)),
    "early exit": ("token", lambda: "early-exit:1"),
}


@pytest.fixture
def graphs(monkeypatch):
    """Run the GPU's paths on a CPU: graphs are faked, and kernels replaced by the reference."""
    reference_kernels.install(monkeypatch)
    return FakeGraphs(monkeypatch)


@pytest.fixture
def rounds(monkeypatch):
    """Count the rounds that stay on the device, and those that the host follows."""
    found = {"device": 0, "host": 0}
    launch, advance = DeviceRounds.launch, schedulers.advance

    def counted_launch(*args):
        found["device"] += 1
        return launch(*args)

    def counted_advance(*args):
        found["host"] += 1
        return advance(*args)

    monkeypatch.setattr(DeviceRounds, "launch", counted_launch)
    monkeypatch.setattr(schedulers, "advance", counted_advance)
    return found


def texts(case, samplings, *, graphs, k=3, budgets=BUDGETS, target=None):
    rule, make = CASES[case]
    engine = dp.load(target or llama(), make(), rule=rule, num_draft_tokens=k, max_batch=3, graphs=graphs)
    prompts = PROMPTS[: len(samplings)]
    outputs = engine.generate(prompts, samplings, max_tokens=budgets[: len(samplings)])
    assert all(output.error is None for output in outputs), outputs
    return [output.tokens for output in outputs], [output.stats.record for output in outputs]


@pytest.mark.parametrize("case", budgeted(CASES, ["plain", "block", "coupled"]))
def test_the_texts_and_the_rounds_are_those_that_the_host_follows(graphs, rounds, case):
    wanted = texts(case, MIXED, graphs=False)
    assert rounds["device"] == 0
    before = rounds["host"]
    assert texts(case, MIXED, graphs=True) == wanted
    assert rounds["device"] > 8
    assert rounds["host"] == before
    assert graphs.replayed > 8


@pytest.mark.parametrize("case", ["block", "coupled"])
def test_filters(graphs, rounds, case):
    wanted = texts(case, FILTERED, graphs=False)
    assert texts(case, FILTERED, graphs=True) == wanted
    assert rounds["device"] > 8


def test_a_wrong_count_of_unread_tokens_is_found(graphs, monkeypatch):
    """Control: a draft model that skips the last token of an accepted draft gives other texts."""
    wanted = texts("block", MIXED, graphs=False)
    places = DeviceDrafting._unread

    def skipping(drafting, texts):
        return places(drafting, texts._replace(behind=texts.behind.clamp_max(1)))

    monkeypatch.setattr(DeviceDrafting, "_unread", skipping)
    assert texts("block", MIXED, graphs=True) != wanted


def test_rows_that_grow_beyond_their_place(graphs, rounds, monkeypatch):
    """With room for few tokens ahead a row moves often: the round under way is read first."""
    monkeypatch.setattr(schedulers, "RESERVED", 1)
    monkeypatch.setattr(device_round, "AHEAD", 8)
    wanted = texts("early exit", LONG, graphs=False, budgets=[120] * 2, target=llama(max_length=256))
    before = rounds["host"]
    assert texts("early exit", LONG, graphs=True, budgets=[120] * 2, target=llama(max_length=256)) == wanted
    assert rounds["device"] > 20
    assert rounds["host"] == before


def test_a_context_that_is_full_ends_the_text(graphs):
    wanted = texts("block", MIXED[:2], graphs=False, budgets=[100, 100])
    assert texts("block", MIXED[:2], graphs=True, budgets=[100, 100]) == wanted
    assert len(wanted[0][0]) == 64 - len(PROMPT)


def test_seeded_texts_with_automatic_lengths_reproduce(graphs, rounds):
    wanted = texts("block", MIXED, graphs=False, k="auto")
    assert texts("block", MIXED, graphs=True, k="auto") == wanted
    assert rounds["device"] > 4


def test_unseeded_greedy_texts_with_automatic_lengths(graphs):
    """Lengths follow times, which differ from run to run; greedy texts do not."""
    greedy = [S(temperature=0.0)] * 4
    assert texts("block", greedy, graphs=True, k="auto")[0] == texts("block", greedy, graphs=False)[0]


def test_stop_strings_and_ends_lose_no_token_and_add_none(graphs):
    def ended(graphs):
        engine = dp.load(llama(), CASES["block"][1](), rule="block", num_draft_tokens=3, graphs=graphs)
        outputs = engine.generate(PROMPTS, MIXED, max_tokens=30, stop_token_ids=[2])
        return [(output.tokens, output.finish_reason) for output in outputs]

    wanted = ended(False)
    assert ended(True) == wanted
    assert any(reason != "length" and len(tokens) > 2 for tokens, reason in wanted), wanted


def test_scores_that_are_no_distribution_fail_their_request_alone(graphs, rounds, monkeypatch):
    """The round is run again by the host, which says what is wrong; the others' texts are what they were."""
    wanted = texts("block", MIXED, graphs=False)[0]
    launch = DeviceRounds._score

    def broken(self, B, rule, *drafted):
        bad = (self._table[device_round.LENGTH, :B] > 20) & (self._table[device_round.TARGET, :B] == 0)
        score = self.rows.launch
        self.rows.launch = lambda *a, **m: score(*a, **m).masked_fill(bad[:, None, None], torch.nan)
        try:
            return launch(self, B, rule, *drafted)
        finally:
            del self.rows.launch

    monkeypatch.setattr(DeviceRounds, "_score", broken)
    assert texts("block", MIXED, graphs=True)[0] == wanted
    assert rounds["host"] > 10  # each round of the row that is broken on the device


def test_a_grammar_takes_the_rows_to_the_host_and_back(graphs, rounds):
    def mixed(graphs):
        engine = dp.load(llama(), CASES["block"][1](), rule="block", num_draft_tokens=3, graphs=graphs)
        service = engine.service()
        first = service.submit(list(PROMPT), MIXED[0], max_tokens=40)
        second = service.submit(list(PROMPT), MIXED[2], max_tokens=6, logprobs=True)
        results = [first.result().tokens, second.result().tokens]
        service.close()
        return results

    wanted = mixed(False)
    before = dict(rounds)
    assert mixed(True) == wanted
    assert rounds["device"] > before["device"]
    assert rounds["host"] > before["host"]


ALPHA = 1e-6
WARM = S(temperature=0.8)


def sampled(rule, n):
    """Sample the first three tokens of texts that take several rounds."""
    engine = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens=3, max_batch=256)
    return sample_texts(engine, PROMPT, [WARM], n, length=3, budget=8)


def p_value(found):
    return g_test(counts(found.texts, V), joint_distribution(llama(), PROMPT, WARM, 3))


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_the_distribution_is_the_target_s(graphs, rounds, rule):
    """A total variation of 0.075, spread evenly over the texts, is found with power 0.9."""
    found = sampled(rule, 10_000)
    assert found.drafting_mattered
    assert rounds["host"] == 0
    assert p_value(found) > ALPHA


@pytest.mark.slow
@pytest.mark.statistical
def test_random_numbers_that_every_round_uses_again_are_found(graphs, monkeypatch):
    """Control: a round that does not advance its random numbers."""
    verify = DeviceVerification.verify

    def repeated(self, logits, draft, starts, rule, traits):
        return verify(self, logits, draft, starts.clamp_max(len(PROMPT)), rule, traits)

    monkeypatch.setattr(DeviceVerification, "verify", repeated)
    assert p_value(sampled("token", 2000)) < ALPHA
