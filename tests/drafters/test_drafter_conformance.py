"""The contract of `Drafter`, checked for every drafter."""

import pytest
import torch

from drafters.every_drafter import ALL, CHAINS, KEEPING, TREES, V
from drafters.toy_rounds import Row, rng_of, row
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD, ROOT, Draft
from draftproof.drafters.interface import NOTHING, Drafter, TargetFeatures, TargetOutputs, features_of
from draftproof.drafters.slem import SLEM
from draftproof.drafters.switch import Switch
from draftproof.drafters.tli import TLI

SAMPLINGS = (
    SamplingParams(temperature=0.8, top_k=4),
    SamplingParams(temperature=0),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
)

every = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
every_alone = pytest.mark.parametrize("make", (CHAINS | TREES).values(), ids=(CHAINS | TREES).keys())


def batch(*lengths: int, first: int = 0, seed: int = 0) -> list[Row]:
    numbers = torch.Generator().manual_seed(seed)
    return [
        row(first + b, torch.randint(V, (n,), generator=numbers).tolist(), SAMPLINGS[b % len(SAMPLINGS)])
        for b, n in enumerate(lengths)
    ]


def go_on(rows: list[Row], draft: Draft, drafter: Drafter, seed: int) -> None:
    """Play a round: keep some of the draft, append a random last token, set the requested target outputs."""
    numbers = torch.Generator().manual_seed(seed)
    for b, r in enumerate(rows):
        line = first_line(draft, b)
        kept = line[: int(torch.randint(len(line) + 1, (), generator=numbers))]
        r.target_outputs = _random_outputs(features_of(drafter), len(r.tokens), len(kept) + 1, numbers)
        r.tokens += [*kept, int(torch.randint(V, (), generator=numbers))]


def _random_outputs(wanted: TargetFeatures, known: int, scored: int, numbers: torch.Generator) -> TargetOutputs | None:
    """Make random outputs of the right shape."""
    if wanted == NOTHING:
        return None
    top = torch.randint(V, (scored, wanted.top), generator=numbers) if wanted.top else None
    hidden = tuple(torch.randn((scored, 16), generator=numbers) for _ in wanted.layers)
    return TargetOutputs(known + scored - 1, top, hidden)


def first_line(draft: Draft, b: int) -> list[int]:
    """Return the first path of a tree down to a leaf; for a chain, all of it."""
    tokens, length = draft.tokens[b].tolist(), int(draft.lengths[b])
    parents = range(-1, length - 1) if draft.parents is None else draft.parents[b].tolist()
    line, at = [], ROOT
    for slot in range(length):
        if parents[slot] == at:
            line.append(tokens[slot])
            at = slot
    return line


def play(drafter: Drafter, rows: list[Row], rounds: int = 5) -> list[Draft]:
    drafts = []
    for i in range(rounds):
        drafts.append(drafter.propose(rows, [(4 + b + i) % 6 for b in range(len(rows))], rng_of(rows)))
        go_on(rows, drafts[-1], drafter, seed=i)
    return drafts


def same(one: Draft, other: Draft) -> bool:
    """Tell whether two drafts are equal; distributions up to rounding."""
    dists = (one.q is None) == (other.q is None)
    if dists and one.q is not None and other.q is not None:
        real = torch.arange(one.tokens.shape[1]) < one.lengths[:, None]
        dists = torch.allclose(one.q.probs()[real], other.q.probs()[real], atol=1e-5)
    parents = one.parents is None or other.parents is None or torch.equal(one.parents, other.parents)
    return dists and parents and torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)


def only(draft: Draft, b: int) -> tuple[list[int], list[int] | None]:
    n = int(draft.lengths[b])
    return draft.tokens[b, :n].tolist(), None if draft.parents is None else draft.parents[b, :n].tolist()


@every
def test_a_draft_is_well_formed(make):
    rows = batch(9, 1, 14)
    for i, draft in enumerate(play(make(), rows, rounds=6)):
        k = torch.tensor([(4 + b + i) % 6 for b in range(3)])
        B, K = draft.tokens.shape
        slot = torch.arange(K)
        real = slot < draft.lengths[:, None]
        assert B == 3
        assert bool((draft.lengths <= k).all())
        assert int(draft.lengths.max()) == K
        assert bool(((draft.tokens >= 0) & (draft.tokens < V))[real].all())
        assert bool((draft.tokens[~real] == PAD).all())
        if draft.parents is not None:
            assert bool(((draft.parents < slot) & (draft.parents >= ROOT)).all())
        if draft.q is not None:
            assert draft.q.lse.shape == (B, K)
            assert draft.q.vocab_size == V
            drawn = real if draft.drawn is None else real & draft.drawn
            assert bool((draft.q.log_prob(draft.tokens)[drawn] > -torch.inf).all())


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_siblings_differ_so_that_no_slot_is_wasted(make):
    for draft in play(make(), batch(9, 20, 14)):
        for b in range(3):
            tokens, parents = only(draft, b)
            if parents is not None:
                assert len(set(zip(tokens, parents, strict=True))) == len(tokens)


@every
def test_a_draft_is_a_function_of_contexts_and_rng(make):
    one, other = play(make(), batch(9, 1, 14)), play(make(), batch(9, 1, 14))
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


@every
def test_a_second_proposal_gives_the_same_draft(make):
    drafter, rows = make(), batch(9, 3, 14)
    play(drafter, rows)
    first = drafter.propose(rows, [5, 3, 4], rng_of(rows))
    assert same(first, drafter.propose(rows, [5, 3, 4], rng_of(rows)))


@every_alone
def test_a_row_does_not_depend_on_its_neighbours(make):
    drafter, rows = make(), batch(9, 3, 14)
    alone, copy = make(), batch(9, 3, 14)[1]
    for i in range(5):
        k = [(4 + b + i) % 6 for b in range(3)]
        draft = drafter.propose(rows, k, rng_of(rows))
        assert only(draft, 1) == only(alone.propose([copy], k[1:2], rng_of([copy])), 0)
        go_on(rows, draft, drafter, seed=i)
        copy.tokens, copy.target_outputs = list(rows[1].tokens), rows[1].target_outputs


@every
def test_a_row_with_k_zero_gets_an_empty_draft(make):
    drafter, rows = make(), batch(9, 3, 14)
    assert int(drafter.propose(rows, [3, 0, 2], rng_of(rows)).lengths[1]) == 0
    empty = drafter.propose(rows, [0, 0, 0], rng_of(rows))
    assert empty.tokens.shape == (3, 0)
    assert empty.lengths.tolist() == [0, 0, 0]
    assert int(drafter.propose(rows, [1, 1, 1], rng_of(rows)).lengths.max()) <= 1


@every
def test_a_context_of_one_token_is_enough(make):
    rows = batch(1)
    draft = make().propose(rows, [4], rng_of(rows))
    assert int(draft.lengths[0]) <= 4


@every_alone
def test_requests_come_and_go(make):
    drafter, rows = make(), batch(9, 3, 14)
    play(drafter, rows)
    rows = [rows[2], *batch(8, first=7, seed=1), rows[0]]
    draft = drafter.propose(rows, [4, 4, 4], rng_of(rows))
    for b, r in enumerate(rows):
        assert only(draft, b) == only(make().propose([r], [4], rng_of([r])), 0) or r.target_outputs is not None


@every
def test_memory_is_bounded_by_the_batch(make):
    drafter = make()
    for first in range(0, 12, 3):
        play(drafter, batch(9, 3, 14, first=first), rounds=2)
    parts = [drafter._copying, drafter._other] if isinstance(drafter, Switch) else [drafter]
    parts = [drafter._reencode, drafter._drafter] if isinstance(drafter, TLI | SLEM) else parts
    for part in parts:
        memory = getattr(part, "_memory", None)
        assert (len(memory) if memory is not None else len(part._reader._known)) == 3


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING.keys())
def test_kept_text_is_used_for_the_next_request(make):
    drafter = make()
    first = row(0, [9, 8])
    drafter.propose([first], [4], rng_of([first]))
    first.tokens += [1, 2, 3, 4, 5, 0]
    drafter.propose([first], [4], rng_of([first]))
    second = row(1, [3, 2, 1, 2])
    drafter.propose([second], [0], rng_of([second]))
    assert drafter.propose([second], [3], rng_of([second])).tokens.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING.keys())
def test_a_request_with_an_earlier_seed_does_not_use_the_text_made_with_it(make):
    drafter = make()
    first = row(0, [9, 8])
    drafter.propose([first], [4], rng_of([first]))
    first.tokens += [1, 2, 3, 4, 5, 0]
    drafter.propose([first], [4], rng_of([first]))
    second = row(1, [3, 2, 1, 2])
    coins = rng_of([row(0, second.tokens)])
    assert int(drafter.propose([second], [3], coins).lengths[0]) == int(make().propose([second], [3], coins).lengths[0])
