"""The toy model: every logit is the table's entry, in chains and trees."""

import time

import pytest
import torch

from draftproof.models.interface import Cache, Model
from draftproof.models.toy import Toy
from models.reference import branch

PARENTS = [-1, 0, 0, -1, 3]


def logits_after(toy, text):
    """Look up the logits after a text by hand."""
    before = text[-2] if len(text) > 1 else 0
    return toy.table[text[-1]] if toy.table.ndim == 2 else toy.table[before, text[-1]]


@pytest.mark.parametrize("order", [1, 2])
def test_ragged_rounds_with_rollbacks_read_the_table(order):
    toy = Toy.random(7, order=order)
    cache = toy.new_cache(2)
    toy(torch.tensor([[1, 2, 3], [4, 0, 0]]), cache)
    cache.keep(torch.tensor([3, 1]))
    texts = [[1, 2, 3], [4]]
    for count in ([0, 2], [2, 1], [1, 0]):
        tokens = torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(sum(count)))
        logits = toy(tokens, cache).logits
        for row in range(2):
            for t in range(3):
                expected = logits_after(toy, texts[row] + tokens[row, : t + 1].tolist())
                assert torch.equal(logits[row, t], expected)
        cache.keep(torch.tensor(count))
        texts = [text + tokens[row, : count[row]].tolist() for row, text in enumerate(texts)]


@pytest.mark.parametrize("order", [1, 2])
def test_a_tree_reads_the_table_at_its_branches_and_caches_its_path(order):
    toy = Toy.random(7, order=order)
    cache = toy.new_cache(2)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    logits = toy(tokens, cache, parents=torch.tensor([PARENTS] * 2)).logits
    for row in range(2):
        for slot in range(-1, len(PARENTS)):
            text = [int(tokens[row, 0]), *(int(tokens[row, 1 + above]) for above in branch(PARENTS, slot))]
            assert torch.equal(logits[row, slot + 1], logits_after(toy, text))
    cache.keep(torch.tensor([3, 1]), torch.tensor([[3, 4, -1, -1, -1], [-1] * 5]))
    assert cache.tokens[0, :3].tolist() == [1, 5, 6]
    after = toy(torch.tensor([[2], [2]]), cache).logits[:, 0]
    assert torch.equal(after, torch.stack([logits_after(toy, [1, 5, 6, 2]), logits_after(toy, [6, 2])]))


def test_rows_leave_and_enter():
    toy = Toy.random(5, order=2)
    cache = toy.new_cache(2)
    toy(torch.tensor([[1, 2], [3, 4]]), cache)
    cache.keep(torch.tensor([2, 1]))
    both = cache.take([1]).join(toy.new_cache(1, capacity=9)).join(cache.take([0]))
    logits = toy(torch.tensor([[1], [1], [1]]), both, scored=1).logits[:, 0]
    assert torch.equal(logits, toy.table[torch.tensor([3, 0, 2]), 1])


def test_three_rounds_of_a_hundred_thousand_rows_take_three_seconds_at_most():
    toy = Toy.random(16)
    cache = toy.new_cache(100_000, capacity=16)
    tokens = torch.randint(0, 16, (100_000, 5), generator=torch.Generator().manual_seed(0))
    toy(tokens, cache)
    started = time.perf_counter()
    for _ in range(3):
        toy(tokens, cache)
        cache.keep(torch.full((100_000,), 2))
    assert time.perf_counter() - started < 3  # 0.1 when the machine is idle


def test_it_is_a_model_and_its_cache_a_cache():
    toy = Toy.random(4)
    assert isinstance(toy, Model)
    assert isinstance(toy.new_cache(1), Cache)
    assert (toy.vocab_size, toy.max_length) == (4, None)


def test_what_a_table_cannot_do_is_refused():
    toy = Toy.random(4)
    with pytest.raises(ValueError, match="a table has no layers"):
        toy(torch.tensor([[1]]), toy.new_cache(1), layers=(1,))
    with pytest.raises(ValueError, match="order=3"):
        Toy.random(4, order=3)
    cache = toy.new_cache(1)
    toy(torch.tensor([[1]]), cache)
    with pytest.raises(ValueError, match="within the last pass's 1 tokens"):
        cache.keep(torch.tensor([2]))
