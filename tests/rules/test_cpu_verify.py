"""Compiled rules decide as the reference does, exactly, and a row takes its path for what it is itself."""

from dataclasses import replace
from functools import cache, partial
from importlib import import_module

import pytest
import torch

import loop
from draftproof.core.distribution import Distribution, DraftVocab, propose
from draftproof.core.draw import TRIALS
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import PAD, Draft, History, InexactError, Verdict
from draftproof.rules import RULES, api, cpu_verify
from draftproof.rules.api import Scored, decide
from draftproof.rules.checks import BAD_DRAFT, BAD_LENGTH, BAD_TARGET, BAD_TOKEN
from draftproof.rules.token import thin
from g_test import g_test

token_rule = import_module("draftproof.rules.token")  # the package also has a function of that name

pytestmark = pytest.mark.skipif(cpu_verify.loops() is None, reason="numba is not installed")

S = SamplingParams
V, K, B = 600, 3, 600
TEMPERATURES = [0.7, 0.8, 1.0, 1.6]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rng_of(rows, first=0):
    return Philox(torch.arange(first, first + rows) * 7919, torch.arange(first, first + rows) % 50)


def samplings_of(rows):
    return [S(temperature=TEMPERATURES[b % len(TEMPERATURES)]) for b in range(rows)]


def greedy(scored):
    """Return the same without temperatures, with drafts of all lengths, of which half of the tokens are right."""
    rows = len(scored.logits)
    right = torch.rand((rows, K), generator=torch.Generator().manual_seed(3)) < 0.5
    tokens = torch.where(right, scored.logits[:, :K].argmax(-1), 7)
    logits = scored.logits.clone()
    logits[::3, :, 300:] = logits[::3, :, :300]  # ties: the first of the largest counts
    return replace(
        scored, logits=logits, samplings=[S(temperature=0)] * rows, draft=Draft(tokens, torch.arange(rows) % (K + 1))
    )


@cache
def scored_of(rows=B, *, distance=1.0, entries=V, seed=0, size=V):
    """Return drafts that were drawn from q, and scores that differ from q's by noise of this size."""
    target = random(rows, K + 1, size, seed=seed) * 2.5
    ids = torch.arange(size) if entries == size else torch.randperm(size, generator=torch.Generator().manual_seed(5))
    vocab = None if entries == size else DraftVocab.of(ids[:entries], size)
    logits = target[:, :K, ids[:entries]] + distance * random(rows, K, entries, seed=seed + 1)
    logits = logits.transpose(0, 1).contiguous().transpose(0, 1)  # slots outermost, as a compiled head has them
    q, rng = warp(logits, samplings_of(rows), vocab=vocab), rng_of(rows)
    tokens = torch.stack([q.at(torch.arange(rows), torch.full((rows,), j)).draw(rng, j=j) for j in range(K)], 1)
    return Scored(target, samplings_of(rows), Draft(tokens, torch.full((rows,), K), q))


def mixed(scored):
    """Return the same with drafts of all lengths, of whose tokens some were chosen."""
    rows = len(scored.logits)
    drawn = torch.rand((rows, K), generator=torch.Generator().manual_seed(9)) < 0.7
    tokens = torch.where(drawn, scored.draft.tokens, scored.logits[:, :K].argmax(-1))
    return replace(
        scored, draft=replace(scored.draft, tokens=tokens, lengths=torch.arange(rows) % (K + 1), drawn=drawn)
    )


def chosen(scored):
    return replace(scored, draft=Draft(scored.logits[:, :K].argmax(-1), scored.draft.lengths))


def without_draft(scored):
    rows = len(scored.logits)
    nothing = Draft(torch.empty((rows, 0), dtype=torch.long), torch.zeros(rows, dtype=torch.long))
    return replace(scored, logits=scored.logits[:, :1], draft=nothing)


CASES = {
    "far apart": lambda: scored_of(distance=2.0),
    "nearly equal": lambda: scored_of(distance=0.03),
    "in a vocabulary": lambda: scored_of(entries=200),
    "mixed": lambda: mixed(scored_of(entries=200)),
    "chosen": lambda: chosen(scored_of(distance=2.0)),
    "greedy": lambda: greedy(scored_of(distance=2.0)),
    "without a draft": lambda: without_draft(scored_of(distance=2.0)),
}


def compiled(scored, rule, rng):
    temperatures = [s.temperature for s in scored.samplings]
    made = cpu_verify.verify_rows(scored.logits, temperatures, scored.draft, rng, rule)
    assert all(made.served)
    return made


def reference(scored, rule, rng):
    return RULES[rule](scored.distribution(scored.draft), scored.draft, rng)


# ------------------------------------------------------------------------------------ the decisions of the reference


def is_near_tie(scored, rule, rng, b, noise=1e-5):
    """Return whether the reference itself decides otherwise after a change of a row's scores in the fifth digit."""
    rows = torch.full((32,), b)
    part = api._some_rows(scored, rows)
    shaken = replace(part, logits=part.logits + noise * random(*part.logits.shape, seed=b))
    return len({tuple(row) for row in reference(shaken, rule, rng.take(rows)).tokens.tolist()}) > 1


def differences(scored, rule, rng, noise=0.0):
    """Return the rows that are decided otherwise if the compiled rules see scores with this noise."""
    noisy = replace(scored, logits=scored.logits + noise * random(*scored.logits.shape, seed=99))
    made, expected = compiled(noisy, rule, rng), reference(scored, rule, rng)
    same = (made.tokens == expected.tokens).all(1)
    assert torch.equal(made.accepted[same], expected.accepted[same])
    return (~same).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", cpu_verify.COMPILED_RULES)
def test_compiled_rules_decide_as_the_reference(rule, case):
    """12 600 rows: one in about a million is expected to differ by rounding."""
    scored, rng = CASES[case](), rng_of(B)
    different = differences(scored, rule, rng)
    assert len(different) <= 2
    for b in different:
        assert is_near_tie(scored, rule, rng, b), f"row {b} is decided otherwise, and not by rounding"


def test_a_difference_in_the_third_digit_is_found():
    scored, rng = scored_of(distance=2.0), rng_of(B)
    different = differences(scored, "block", rng, noise=5e-3)
    assert len(different) > 2
    assert not all(is_near_tie(scored, "block", rng, b) for b in different)


def test_trials_that_all_fail_are_among_the_cases(monkeypatch):
    """With q near p, some residual tokens are drawn from the residual written out."""
    failed = []

    def counted(*args):
        found = thin(*args)
        failed.append(int((found < 0).sum()))
        return found

    monkeypatch.setattr(token_rule, "thin", counted)
    reference(scored_of(distance=0.03), "token", rng_of(B))
    assert sum(failed) >= TRIALS


def test_verdicts_do_not_depend_on_the_number_of_threads():
    scored, rng = scored_of(64), rng_of(64)
    made, threads = compiled(scored, "block", rng), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = compiled(scored, "block", rng)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made.tokens, again.tokens)
    assert torch.equal(made.accepted, again.accepted)


# ------------------------------------------------------------------------------------------------------ the exactness

ALPHA = 1e-6
TEXTS = 200_000
"""Texts of 64 cells: a bias of TV 0.012 is found at ALPHA with power > 0.9."""

WARM = 0.7
IDS = torch.tensor([3, 0, 1])


def verifier(rule, temperature=WARM):
    """Return a compiled rule for loop.texts: it gets logits whose softmax at a temperature are the distributions."""

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        logits = p.logits * WARM
        made = cpu_verify.verify_rows(logits, [temperature] * len(logits), draft, rng, rule)
        assert all(made.served)
        return Verdict(made.tokens, made.accepted)

    return verify


def drafter_at(last, vocab):
    """Return the drafter's distributions after these tokens, over three of the four tokens, at a temperature."""
    logits = loop.DRAFTER[:, IDS] * WARM
    like = last.double()
    return Distribution(
        logits[last],
        torch.full_like(like, 1 / WARM),
        torch.full_like(like, -torch.inf, dtype=torch.float32),
        (logits.double() / WARM).logsumexp(-1)[last],
        torch.full_like(last, PAD),
        vocab,
        plain=True,
    )


def in_a_vocabulary(last, rng, ids=IDS):
    """Propose tokens drawn from three of the four; `ids` are what the draft says that they are."""
    before, tokens, vocab = [], [], DraftVocab.of(IDS, loop.V)
    for j in range(loop.K):
        before.append(last)
        last = propose(drafter_at(last, vocab), rng, j)
        tokens.append(last)
    q = drafter_at(torch.stack(before, 1), DraftVocab.of(ids, loop.V))
    return Draft(torch.stack(tokens, 1), torch.full_like(last, loop.K), q)


EXACT = [("block", in_a_vocabulary), ("block", loop.mixed), ("token", in_a_vocabulary), ("coupled", loop.mixed)]


@pytest.mark.statistical
@pytest.mark.parametrize(("rule", "drafts"), EXACT)
def test_texts_have_the_targets_joint_distribution(rule, drafts):
    assert g_test(loop.texts(verifier(rule), drafts, TEXTS).counts, loop.joint()) > ALPHA


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("rule", "temperature", "drafts"),
    [
        ("block", WARM, partial(in_a_vocabulary, ids=torch.tensor([0, 3, 1]))),  # q of other tokens
        ("token", WARM, partial(in_a_vocabulary, ids=torch.tensor([0, 3, 1]))),
        ("coupled", 1.05 * WARM, loop.drawn),
    ],
)
def test_wrong_variants_are_caught_by_the_same_test(rule, temperature, drafts):
    counts = loop.texts(verifier(rule, temperature), drafts, TEXTS).counts
    assert g_test(counts, loop.joint()) < ALPHA


# ----------------------------------------------------------------------------------------------- the path of each row

ROWS = 8
FILTERED, PENALISED = S(temperature=0.8, top_k=5), S(temperature=0.8, repetition_penalty=1.3)


@pytest.fixture
def served(monkeypatch):
    """Let small vocabularies be served, and record which rows were, call by call."""
    calls, verify_rows = [], cpu_verify.verify_rows

    def recorded(*args):
        made = verify_rows(*args)
        calls.append(made.served)
        return made

    monkeypatch.setattr(cpu_verify, "SMALLEST_VOCABULARY", 0)
    monkeypatch.setattr(cpu_verify, "verify_rows", recorded)
    return calls


def decided(scored, rule="block", rng=None):
    rng = rng_of(len(scored.logits)) if rng is None else rng
    return decide(scored, lambda: rng, rule, lambda decision: decision)


def of_all_kinds():
    """Return rows drawn at a temperature and greedy ones beside filtered, penalised, masked and faulty ones.

    Row 1 is greedy with a q of its own, which is a point mass, and row 7 with a chosen draft.
    """
    scored = scored_of(ROWS)
    samplings = [S(temperature=0.8), S(temperature=0), FILTERED, PENALISED, *[S(temperature=0.8)] * 3, S(temperature=0)]
    q = warp(scored.draft.q.logits, samplings, [History([1], [2])] * ROWS, scored.draft)
    allowed = torch.ones(scored.logits.shape, dtype=torch.bool)
    allowed[4, :, ::2] = False
    logits = scored.logits.clone()
    logits[5, K, 7] = torch.nan
    tokens = scored.draft.tokens.clone()
    tokens[1], tokens[2] = q.point[1], q.logits[2].argmax(-1)
    drawn = torch.ones((ROWS, K), dtype=torch.bool)
    drawn[7] = False
    draft = replace(scored.draft, tokens=tokens, q=q, drawn=drawn)
    return Scored(logits, samplings, draft, [History([1], [2])] * ROWS, allowed)


def alone(scored, b):
    return api._some_rows(scored, torch.tensor([b]))


@pytest.mark.parametrize("rule", cpu_verify.COMPILED_RULES)
def test_a_rows_path_and_verdict_do_not_depend_on_its_neighbours(rule, served):
    scored, rng = of_all_kinds(), rng_of(ROWS)
    together = decided(scored, rule, rng)
    assert served == [[True, False, False, False, False, False, True, True]]
    for b in range(ROWS):
        del served[:]
        one = decided(alone(scored, b), rule, rng.take(torch.tensor([b])))
        assert served in ([[True]], [[False]], []), "no row is served twice"
        assert (served == [[True]]) == (b in (0, 6, 7))
        for name in ("faults", "sound"):
            assert getattr(together, name)[b] == getattr(one, name)[0], name
        assert together.verdict.tokens[b].tolist() == one.verdict.tokens[0].tolist()
        assert together.verdict.accepted[b] == one.verdict.accepted[0]


def test_faults_are_the_references(served, monkeypatch):
    """Of NaN scores, a token outside the vocabulary, a length beyond it, and tokens that q cannot have drawn."""
    scored = scored_of(ROWS)
    draft = replace(scored.draft, tokens=scored.draft.tokens.clone(), lengths=scored.draft.lengths.clone())
    q = replace(draft.q, lse=draft.q.lse.clone())
    scored = replace(scored, logits=scored.logits.clone(), draft=replace(draft, q=q))
    scored.logits[0, 1, 3] = torch.nan
    scored.logits[1, 0] = -torch.inf
    scored.logits[2, 0, 0] = torch.inf
    draft.tokens[3, 0], draft.lengths[4] = V, K + 1
    q.lse[5, 0], q.lse[6, 1] = torch.nan, -1.0
    made = decided(scored)
    assert served == [[False] * 7 + [True]]
    monkeypatch.setattr(cpu_verify, "has_compiled", lambda *_: False)
    expected = decided(scored)
    faults = [BAD_TARGET, BAD_TARGET, BAD_TARGET, BAD_TOKEN, BAD_LENGTH, BAD_DRAFT, BAD_DRAFT, 0]
    assert made.faults.tolist() == expected.faults.tolist() == faults
    assert made.sound.tolist() == expected.sound.tolist()
    assert made.verdict.tokens.tolist() == expected.verdict.tokens.tolist()
    assert made.draft.lengths.tolist() == expected.draft.lengths.tolist()
    assert made.draft.tokens.tolist() == expected.draft.tokens.tolist()


def test_logits_of_minus_infinity_are_never_drawn(served):
    scored = without_draft(scored_of(64))
    logits = scored.logits.clone()
    logits[:, 0, 3:] = -torch.inf
    made = decided(replace(scored, logits=logits), "coupled")
    assert served == [[True] * 64]
    assert set(made.verdict.tokens.flatten().tolist()) == {0, 1, 2}


def test_what_is_not_compiled_is_left_to_the_reference(served):
    scored = scored_of(2)
    decided(replace(scored, logits=scored.logits.double()))
    decided(replace(scored, samplings=[FILTERED, PENALISED], history=[History([1], [2])] * 2))
    decided(scored, RULES["block"])
    decided(replace(scored, target=lambda draft: warp(scored.logits, scored.samplings)))
    with pytest.raises(InexactError, match="own random numbers"):
        decided(replace(scored, draft=replace(scored.draft, shared_rng=True)))
    assert served == []
    decided(replace(scored, draft=replace(scored.draft, shared_rng=True)), "coupled")
    assert served == [[True, True]]


def test_small_vocabularies_are_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(cpu_verify, "verify_rows", None)
    decided(scored_of(2))
