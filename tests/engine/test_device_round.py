"""Rounds that stay on the device give the texts of rounds that the host follows, in a changing batch."""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.drafters import head_reader
from draftproof.drafters.device_head import HeadDrafting
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.engine import device_round
from draftproof.engine import scheduler as schedulers
from draftproof.engine.device_round import DeviceRounds
from draftproof.engine.draft_length import DraftLengths
from draftproof.kernels import round_steps
from draftproof.kernels.round_table import LENGTH, TARGET
from draftproof.models.extents import PAGE
from draftproof.models.head.attach_published import fitted_eagle3
from draftproof.models.hf import HFModel
from draftproof.rules.device_verify import DeviceVerification
from engine import reference_kernels
from engine.fake_graphs import FakeGraphs
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from engine.tiny_heads import on_target, published
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
    "head": ("block", lambda: HeadDrafter(on_target(6))),
    "head, token": ("token", lambda: HeadDrafter(on_target(6))),
    "head, coupled": ("coupled", lambda: HeadDrafter(on_target(6))),
    "confident head": ("block", lambda: HeadDrafter(on_target(6), confidence=0.3)),
    "published head": ("block", lambda: f"eagle3:{published()}"),
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


@pytest.mark.parametrize("case", budgeted(list(CASES), ["plain", "block", "coupled", "head", "published head"]))
def test_the_texts_and_the_rounds_are_those_that_the_host_follows(graphs, rounds, case):
    wanted = texts(case, MIXED, graphs=False)
    assert rounds["device"] == 0
    before = rounds["host"]
    assert texts(case, MIXED, graphs=True) == wanted
    assert rounds["device"] > 8
    assert rounds["host"] == before
    assert graphs.replayed > 8


@pytest.mark.parametrize("case", budgeted(["block", "coupled", "head", "head, coupled"], ["block", "coupled"]))
def test_filters(graphs, rounds, case):
    wanted = texts(case, FILTERED, graphs=False)
    assert texts(case, FILTERED, graphs=True) == wanted
    assert rounds["device"] > 8


def test_a_wrong_count_of_unread_tokens_is_found(graphs, monkeypatch):
    """Control: a draft model that skips the last token of an accepted draft gives other texts."""
    wanted = texts("block", MIXED, graphs=False)
    right = round_steps.begin_draft

    def skipping(table, K, **options):
        steps = right(table, K, **options)
        start, before, unread = steps.places[0]
        steps.places[0] = torch.stack([start, before + (unread == 2), unread.clamp_max(1)])
        tokens = torch.where(unread[:, None] == 2, steps.tokens[:, 1:], steps.tokens)
        return steps._replace(tokens=tokens)

    monkeypatch.setattr(round_steps, "begin_draft", skipping)
    assert texts("block", MIXED, graphs=True) != wanted


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda counts: counts.clamp_max(1), id="skips accepted tokens"),
        pytest.param(lambda counts: counts + (counts > 0), id="reads a rejected token"),
    ],
)
def test_a_head_that_reads_a_wrong_number_of_states_is_found(graphs, monkeypatch, read):
    """Control: its drafts, and so the texts, are others."""
    wanted = texts("head", MIXED, graphs=False)
    right = HeadDrafting.read

    def wrong(drafting, hidden, tokens, places):
        counts = read(places[2]).clamp_max(tokens.shape[1])
        right(drafting, hidden, tokens, torch.stack([places[0], places[1], counts]))

    monkeypatch.setattr(HeadDrafting, "read", wrong)
    assert texts("head", MIXED, graphs=True) != wanted


@pytest.mark.parametrize("case", budgeted(["early exit", "head"], ["early exit"]))
def test_rows_that_grow_beyond_their_place(graphs, rounds, monkeypatch, case):
    """With room for few tokens ahead a row moves often: the round under way is read first."""
    monkeypatch.setattr(schedulers, "RESERVED", 1)
    monkeypatch.setattr(device_round, "AHEAD", 8)
    monkeypatch.setattr(head_reader, "ROOM", 1)
    wanted = texts(case, LONG, graphs=False, budgets=[120] * 2, target=llama(max_length=256))
    before = rounds["host"]
    assert texts(case, LONG, graphs=True, budgets=[120] * 2, target=llama(max_length=256)) == wanted
    assert rounds["device"] > 20
    assert rounds["host"] == before


def test_a_context_that_is_full_ends_the_text(graphs):
    wanted = texts("block", MIXED[:2], graphs=False, budgets=[100, 100])
    assert texts("block", MIXED[:2], graphs=True, budgets=[100, 100]) == wanted
    assert len(wanted[0][0]) == 64 - len(PROMPT)


@pytest.mark.parametrize("case", ["block", "head"])
def test_seeded_texts_with_automatic_lengths_reproduce(graphs, rounds, case):
    wanted, records = texts(case, MIXED, graphs=False, k="auto")
    found, others = texts(case, MIXED, graphs=True, k="auto")
    assert found == wanted
    for sampling, record, other in zip(MIXED, records, others, strict=True):
        assert record == other or sampling.temperature == 0  # a greedy text does not depend on its draft lengths
    assert rounds["device"] > 4


@pytest.mark.parametrize("case", ["block", "head"])
def test_unseeded_greedy_texts_with_automatic_lengths(graphs, case):
    """Lengths follow times, which differ from run to run; greedy texts do not."""
    greedy = [S(temperature=0.0)] * 4
    assert texts(case, greedy, graphs=True, k="auto")[0] == texts(case, greedy, graphs=False)[0]


@pytest.mark.parametrize("case", ["head", "block"])
def test_drafts_that_come_and_go(graphs, rounds, monkeypatch, case):
    """The states of rounds without a draft wait for a head, which reads them when it drafts again."""

    def drafted(graphs):
        before, lengths = sum(rounds.values()), [0, 2, 0, 0, 4, 1, 6, 0, 3]

        def in_turn(self, sessions):
            return [lengths[(sum(rounds.values()) - before) % len(lengths)] for _ in sessions]

        monkeypatch.setattr(DraftLengths, "choose", in_turn)
        return texts(case, MIXED[:1], graphs=graphs, budgets=[45])

    wanted = drafted(False)
    before = rounds["host"]
    assert drafted(True) == wanted
    assert rounds["host"] == before
    assert rounds["device"] > 10


def test_stop_strings_and_ends_lose_no_token_and_add_none(graphs):
    def ended(graphs):
        engine = dp.load(llama(), CASES["block"][1](), rule="block", num_draft_tokens=3, graphs=graphs)
        outputs = engine.generate(PROMPTS, MIXED, max_tokens=30, stop_token_ids=[2])
        return [(output.tokens, output.finish_reason) for output in outputs]

    wanted = ended(False)
    assert ended(True) == wanted
    assert any(reason != "length" and len(tokens) > 2 for tokens, reason in wanted), wanted


@pytest.mark.parametrize("case", budgeted(["block", "head"], ["block"]))
def test_scores_that_are_no_distribution_fail_their_request_alone(graphs, rounds, monkeypatch, case):
    """The round is run again by the host, which says what is wrong; the others' texts are what they were."""
    wanted = texts(case, MIXED, graphs=False)[0]
    launch = DeviceRounds._score

    def broken(self, B, rule, *drafted):
        bad = (self._table[LENGTH, :B] > 20) & (self._table[TARGET, :B] == 0)
        score = self.rows.launch

        def broken_pass(*args, **more):
            forward = score(*args, **more)
            return replace(forward, logits=forward.logits.masked_fill(bad[:, None, None], torch.nan))

        self.rows.launch = broken_pass
        try:
            return launch(self, B, rule, *drafted)
        finally:
            del self.rows.launch

    monkeypatch.setattr(DeviceRounds, "_score", broken)
    assert texts(case, MIXED, graphs=True)[0] == wanted
    assert rounds["host"] > 10  # each round of the row that is broken on the device


@pytest.mark.parametrize("case", ["block", "head"])
def test_a_grammar_takes_the_rows_to_the_host_and_back(graphs, rounds, case):
    def mixed(graphs):
        engine = dp.load(llama(), CASES[case][1](), rule="block", num_draft_tokens=3, graphs=graphs)
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


@pytest.mark.parametrize("case", budgeted(["block", "head"], []))
def test_preempted_rows_go_on_as_if_nothing_had_happened(graphs, rounds, monkeypatch, case):
    monkeypatch.setattr(schedulers, "RESERVED", 1)
    monkeypatch.setattr(device_round, "AHEAD", 8)
    pages = 5

    def made(graphs):
        target, drafter = llama(max_length=512), CASES[case][1]()
        token = sum(shape.bytes for shape in HFModel(target).kv_shapes()) + 2 * drafter.kv_bytes()
        memory = pages * PAGE * token
        engine = dp.load(target, drafter, rule="block", num_draft_tokens=3, graphs=graphs, kv_memory=memory)
        outputs = engine.generate(PROMPTS[:3], MIXED[:3], max_tokens=[120, 110, 100])
        return [output.tokens for output in outputs], sum(output.stats.preemptions for output in outputs)

    wanted, _ = made(False)
    found, preemptions = made(True)
    assert found == wanted
    assert preemptions > 0
    assert rounds["device"] > 20


@pytest.mark.parametrize("case", budgeted(["block", "head"], ["head"]))
def test_engines_that_share_a_drafter(graphs, case):
    """Each engine opens a pool of another size for it; the rounds of both go on over the last one."""
    rule, make = CASES[case]

    def made(graphs):
        drafter, found = make(), []
        sizes = (2, 3)
        engines = [
            dp.load(llama(), drafter, rule=rule, num_draft_tokens=3, max_batch=rows, graphs=graphs) for rows in sizes
        ]
        for n, engine in enumerate((*engines, *engines)):  # each time about something else
            prompts = [[(5 * token + n) % V for token in prompt] for prompt in PROMPTS[:2]]
            outputs = engine.generate(prompts, MIXED[:2], max_tokens=12)
            found.append([(output.tokens, output.stats.record) for output in outputs])
        return found

    assert made(True) == made(False)


REFUSED = {
    "a tree": ("tree", lambda: HeadDrafter(on_target(6), branches=2), "a drafter with branches makes trees"),
    "two drafters": ("block", lambda: Switch(Suffix(), HeadDrafter(on_target(6)), enough=3), "Switch drafts on the"),
    "a head without graphs": ("block", lambda: HeadDrafter(on_target(6), graphs=False), "the head are not recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_need_the_host_say_why(graphs, rounds, monkeypatch, name):
    rule, make, reason = REFUSED[name]
    found, refusal = set(), DeviceRounds.refusal
    monkeypatch.setattr(DeviceRounds, "refusal", lambda *args: found.add(refusal(*args)) or refusal(*args))
    engine = dp.load(llama(), make(), rule=rule, num_draft_tokens=3)
    engine.generate(PROMPTS[:1], MIXED[:1], max_tokens=6)
    assert rounds["device"] == 0
    [why] = found
    assert reason in why


def test_a_published_head_on_a_cpu_is_arranged_by_the_host():
    drafter = HeadDrafter(fitted_eagle3(published(), llama()))
    assert drafter.device_drafting(4) == "a cache of Eagle3 is arranged by the host"


ALPHA = 1e-6
WARM = S(temperature=0.8)


def sampled(rule, n, drafter=neighbour):
    """Sample the first three tokens of texts that take several rounds."""
    engine = dp.load(llama(), drafter(), rule=rule, num_draft_tokens=3, max_batch=256)
    return sample_texts(engine, PROMPT, [WARM], n, length=3, budget=8)


def p_value(found):
    return g_test(counts(found.texts, V), joint_distribution(llama(), PROMPT, WARM, 3))


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
@pytest.mark.parametrize("drafter", [neighbour, lambda: HeadDrafter(on_target(6))], ids=["model", "head"])
def test_the_distribution_is_the_target_s(graphs, rounds, rule, drafter):
    """A total variation of 0.075, spread evenly over the texts, is found with power 0.9."""
    found = sampled(rule, 10_000, drafter)
    assert found.drafting_mattered
    assert rounds["host"] == 0
    assert p_value(found) > ALPHA


@pytest.mark.slow
@pytest.mark.statistical
def test_random_numbers_that_every_round_uses_again_are_found(graphs, monkeypatch):
    """Control: a round that does not advance its random numbers."""
    verify = device_round.verify

    def repeated(logits, draft, rule, parameters):
        parameters["positions"].clamp_(max=len(PROMPT))
        return verify(logits, draft, rule, parameters)

    monkeypatch.setattr(device_round, "verify", repeated)
    assert p_value(sampled("token", 2000)) < ALPHA


@pytest.mark.slow
@pytest.mark.statistical
def test_a_head_whose_draft_is_verified_with_another_temperature_is_found(graphs, monkeypatch):
    """Control: verified as if it was drawn at half the temperature."""
    load = DeviceVerification.load
    monkeypatch.setattr(
        DeviceVerification,
        "load",
        lambda self, samplings, drawn, seeds: load(self, samplings, [t / 2 for t in drawn], seeds),
    )
    assert p_value(sampled("token", 10_000, lambda: HeadDrafter(on_target(6)))) < ALPHA
