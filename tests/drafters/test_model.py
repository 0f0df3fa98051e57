"""Model drafts carry the distribution of a plain forward pass, after any sequence of rounds."""

import pytest
import torch
from torch import Tensor

from drafters.every_drafter import V, tiny_llama, toy
from drafters.toy_rounds import Row, rng_of, row
from draftproof.core.distribution import propose
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import Draft
from draftproof.drafters.model import ModelDrafter, early_exit
from draftproof.models.interface import Forward, Model
from draftproof.models.toy import Toy

WARPS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.05),
    SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={1: 0.7}
    ),
    SamplingParams(temperature=0),
]


def plain_logits(model: Model, tokens: list[int]) -> Tensor:
    """Compute the logits after the last token by one pass over the whole text with a new cache."""
    return model(torch.tensor([tokens], device=model.device), model.new_cache(1), scored=1).logits[0, 0].cpu()


def expected(model: Model, r: Row, drafted: list[int], sampling: SamplingParams, V: int) -> Tensor:
    """Compute the next token's distribution by definition: plain forward, cut to the target's vocabulary, warp."""
    logits = plain_logits(model, [*r.tokens, *drafted])[:V]
    if len(logits) < V:
        logits = torch.cat([logits, logits.new_full((V - len(logits),), -torch.inf)])
    history = r.history._replace(output=[*r.history.output, *drafted])
    return warp(logits[None, None], [sampling], [history]).probs()[0, 0]


def check_distributions(model: Model, rows: list[Row], draft: Draft, vocab_size: int = V) -> int:
    """Check every declared distribution against the definition; return how many were checked."""
    if draft.q is None:
        return 0
    probs, checked = draft.q.probs().cpu(), 0
    for b, r in enumerate(rows):
        for i in range(int(draft.lengths[b])):
            wanted = expected(model, r, draft.tokens[b, :i].tolist(), r.sampling, vocab_size)
            torch.testing.assert_close(probs[b, i], wanted, atol=1e-5, rtol=0)
            checked += 1
    return checked


def go_on(rows: list[Row], draft: Draft, numbers: torch.Generator) -> None:
    """Keep some of each draft, all of it about half of the time, and append a random last token."""
    for b, r in enumerate(rows):
        n = int(draft.lengths[b])
        kept = min(n, int(torch.randint(2 * n + 1, (), generator=numbers)))
        r.tokens += [*draft.tokens[b, :kept].tolist(), int(torch.randint(V, (), generator=numbers))]


@pytest.mark.parametrize("model", [toy(), tiny_llama()], ids=["toy", "llama"])
def test_the_distribution_is_the_plain_forward_s_after_ragged_rounds_with_rejections(model):
    drafter, numbers = ModelDrafter(model), torch.Generator().manual_seed(0)
    rows = [row(b, torch.randint(V, (3 + 4 * b,), generator=numbers).tolist(), s) for b, s in enumerate(WARPS)]
    checked = 0
    for i in range(4):
        draft = drafter.propose(rows, [(b + i) % 5 for b in range(len(rows))], rng_of(rows))
        checked += check_distributions(model, rows, draft)
        go_on(rows, draft, numbers)
        if i == 1:  # one leaves, one enters with a long text, and the order changes
            rows = [rows[3], row(9, [1, 2, 3] * 6, WARPS[1]), *rows[:3]]
    assert checked > 30


def test_the_bonus_token_and_the_last_drafted_one_are_read_when_all_were_kept():
    """vLLM#9730: their keys and values were missing, so the next distribution belonged to another text."""
    model, r = tiny_llama(), row(0, [1, 2, 3])
    drafter = ModelDrafter(model)
    draft = drafter.propose([r], [3], rng_of([r]))
    r.tokens += [*draft.tokens[0].tolist(), 4]
    assert check_distributions(model, [r], drafter.propose([r], [2], rng_of([r]))) == 2


def test_rounds_without_a_draft_are_caught_up_with():
    """Then more than one token is new, and tokens drafted earlier may lie where the text has others."""
    model, r = tiny_llama(), row(0, [1, 2, 3])
    drafter = ModelDrafter(model)
    drafted = drafter.propose([r], [4], rng_of([r])).tokens[0].tolist()
    r.tokens += [drafted[0], *((t + 1) % V for t in drafted[1:]), 5]
    drafter.propose([r], [0], rng_of([r]))
    r.tokens += [2, 2]
    assert check_distributions(model, [r], drafter.propose([r], [3], rng_of([r]))) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_the_tokens_are_drawn_from_that_distribution_with_the_rng_given(shared):
    rows = [row(b, [b, 1, 2], s) for b, s in enumerate(WARPS)]
    rng = rng_of(rows, shared=shared)
    draft = ModelDrafter(toy()).propose(rows, [4] * len(rows), rng)
    assert draft.q is not None
    assert draft.shared_rng == shared
    everyone = torch.arange(len(rows))
    for j in range(4):
        dist = draft.q.at(everyone, torch.full_like(everyone, j))
        assert torch.equal(draft.tokens[:, j], propose(dist, rng, j))


def test_greedy_rows_take_the_argmax_also_where_the_drafter_has_its_own_temperature():
    model, r = toy(), row(0, [3, 1], SamplingParams(temperature=0))
    tokens = ModelDrafter(model, temperature=5.0).propose([r], [3], rng_of([r])).tokens[0].tolist()
    for i, token in enumerate(tokens):
        assert token == int(plain_logits(model, [*r.tokens, *tokens[:i]]).argmax())


def test_the_drafter_s_own_temperature_is_the_one_declared():
    model, r = toy(), row(0, [3, 1], SamplingParams(temperature=1.0, top_k=4))
    draft = ModelDrafter(model, temperature=0.3).propose([r], [2], rng_of([r]))
    assert draft.q is not None
    wanted = expected(model, r, [], SamplingParams(temperature=0.3, top_k=4), V)
    torch.testing.assert_close(draft.q.probs()[0, 0], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [V + 3, V - 2], ids=["larger", "smaller"])
def test_a_vocabulary_padded_otherwise_is_cut_or_widened(size):
    """Tokens that only one of the two has are never drawn, have probability 0, and may occur in a text."""
    model, numbers = toy(size), torch.Generator().manual_seed(3)
    rows = [row(b, [5, 4, b], s) for b, s in enumerate(WARPS)]
    readable = [row(r.id, [t if t < size else 0 for t in r.tokens], r.sampling) for r in rows]
    drafter = ModelDrafter(model, vocab_size=V)
    for _ in range(3):
        draft = drafter.propose(rows, [3] * len(rows), rng_of(rows))
        assert draft.q is not None
        assert draft.q.vocab_size == V
        assert int(draft.tokens.max()) < min(size, V)
        for b in (0, 1, 2, 4):  # with a penalty the history matters too, and `readable` has another one
            wanted = expected(model, readable[b], [], rows[b].sampling, V)
            torch.testing.assert_close(draft.q.probs()[b, 0], wanted, atol=1e-5, rtol=0)
        go_on(rows, draft, numbers)
        readable = [row(r.id, [t if t < size else 0 for t in r.tokens], r.sampling) for r in rows]


def test_a_path_that_becomes_unlikely_ends_with_the_token_that_made_it_so():
    rows = [row(b, [b % V, 1]) for b in range(40)]
    every = ModelDrafter(toy()).propose(rows, [4] * 40, rng_of(rows))
    draft = ModelDrafter(toy(), confidence=0.02).propose(rows, [4] * 40, rng_of(rows))
    assert every.q is not None
    weak = every.q.log_prob(every.tokens).cumsum(1).exp() < 0.02
    first = torch.where(weak.any(1), weak.int().argmax(1) + 1, 4)
    assert torch.equal(draft.lengths, first)
    assert 0 < int((first < 4).sum()) < 40
    for b in range(40):
        assert draft.tokens[b, : first[b]].tolist() == every.tokens[b, : first[b]].tolist()


def test_in_a_tree_the_drawn_slot_comes_first_and_the_likeliest_others_after_it():
    model, rows = toy(), [row(b, [b, 1]) for b in range(5)]
    draft = ModelDrafter(model, branches=3).propose(rows, [5, 6, 3, 1, 0], rng_of(rows))
    chain = ModelDrafter(model).propose(rows, [1] * 5, rng_of(rows))
    assert draft.lengths.tolist() == [5, 6, 3, 1, 0]
    assert draft.parents is not None
    assert draft.drawn is not None
    assert draft.parents[0].tolist() == [-1, -1, -1, 0, 0, 0]
    assert draft.drawn[0].tolist() == [True, False, False, True, False, False]
    assert draft.tokens[:4, 0].tolist() == chain.tokens[:4, 0].tolist()
    for b in range(3):
        order = plain_logits(model, rows[b].tokens).argsort(descending=True).tolist()
        order.remove(int(draft.tokens[b, 0]))
        assert draft.tokens[b, 1:3].tolist() == order[:2]


def test_a_row_with_no_positions_left_drafts_nothing_and_the_others_go_on():
    model = tiny_llama(max_length=16)
    rows = [row(0, [1, 2] * 4), row(1, [1, 2, 3] * 5), row(2, [3] * 16), row(3, [3] * 20)]
    drafter = ModelDrafter(model)
    for _ in range(2):
        draft = drafter.propose(rows, [5, 5, 5, 5], rng_of(rows))
        assert draft.lengths.tolist() == [5, 1, 0, 0]
        assert check_distributions(model, rows[:1], draft) == 5
    rows[1].tokens += [4, 4]
    assert drafter.propose(rows, [5, 5, 5, 5], rng_of(rows)).lengths.tolist() == [5, 0, 0, 0]


def test_a_row_with_nan_logits_drafts_nothing():
    table = toy().table.clone()
    table[2, 2] = torch.nan
    rows = [row(0, [2, 2]), row(1, [1, 3])]
    draft = ModelDrafter(Toy(table)).propose(rows, [3, 3], rng_of(rows))
    assert int(draft.lengths[0]) == 0
    assert int(draft.lengths[1]) > 0


class Counting:
    """A model that records the shape of each pass."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.passes: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, cache: object, **options: object) -> Forward:
        self.passes.append((tokens.shape[0], tokens.shape[1]))
        return self.model(tokens, cache, **options)

    vocab_size = property(lambda self: self.model.vocab_size)
    max_length = property(lambda self: self.model.max_length)
    device = property(lambda self: self.model.device)
    new_cache = property(lambda self: self.model.new_cache)


def test_a_round_costs_a_pass_for_each_token_and_a_text_is_read_once():
    model = Counting(toy())
    drafter, r = ModelDrafter(model), row(0, [1, 2, 3] * 10)
    draft = drafter.propose([r], [4], rng_of([r]))
    assert model.passes == [(1, 29), (1, 1), (1, 1), (1, 1), (1, 1)]
    r.tokens += [*draft.tokens[0, :4].tolist(), 0]  # all kept: the last drafted token and the bonus token are new
    model.passes.clear()
    draft = drafter.propose([r], [2], rng_of([r]))
    assert model.passes == [(1, 2), (1, 1)]
    r.tokens += [(int(draft.tokens[0, 0]) + 1) % V]  # nothing kept
    model.passes.clear()
    drafter.propose([r], [1], rng_of([r]))
    assert model.passes == [(1, 1)]


def test_a_new_request_is_read_apart_from_the_others():
    model = Counting(toy())
    drafter, rows = ModelDrafter(model), [row(0, [1, 2, 3])]
    drafter.propose(rows, [1], rng_of(rows))
    rows.append(row(1, [4] * 50))
    model.passes.clear()
    drafter.propose(rows, [1, 1], rng_of(rows))
    assert model.passes == [(1, 49), (2, 1)]


def test_the_first_layers_of_the_target_draft_without_touching_it():
    target = tiny_llama()
    drafter, short = early_exit(target, 1), target.first_layers(1)
    rows = [row(0, [1, 2, 3, 4]), row(1, [5, 0])]
    before = plain_logits(target, [1, 2, 3])
    for _ in range(3):
        draft = drafter.propose(rows, [3, 2], rng_of(rows))
        assert check_distributions(short, rows, draft) == 5
        go_on(rows, draft, torch.Generator().manual_seed(1))
    assert torch.equal(before, plain_logits(target, [1, 2, 3]))


def test_a_target_without_layers_is_refused():
    with pytest.raises(ValueError, match="a Toy has none"):
        early_exit(toy(), 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"confidence": 1.5}, "confidence must be a probability"),
        ({"temperature": -1.0}, "temperature must be a number"),
        ({"branches": 0}, "branches must be a whole number"),
        ({"branches": V + 1}, "only 6 tokens in common"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelDrafter(toy(), **wrong)


def test_random_numbers_of_other_rounds_give_other_drafts():
    rows = [row(b, [b % V, 1]) for b in range(20)]
    rng = rng_of(rows)
    later = Philox(rng.seeds, rng.starts + 1)
    one, other = (ModelDrafter(toy()).propose(rows, [3] * 20, n).tokens for n in (rng, later))
    assert not torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_distribution_is_the_plain_forward_s_too():
    model, numbers = tiny_llama(device="cuda"), torch.Generator().manual_seed(0)
    drafter = ModelDrafter(model)
    rows = [row(b, [b, 1, 2], s) for b, s in enumerate(WARPS)]
    for i in range(3):
        rng = rng_of(rows)
        draft = drafter.propose(rows, [(b + i) % 5 for b in range(5)], Philox(rng.seeds.cuda(), rng.starts.cuda()))
        assert draft.tokens.is_cuda
        assert check_distributions(model, rows, draft) == int(draft.lengths.sum())
        go_on(rows, draft, numbers)
