"""The slot cache: what is kept stays, what is not kept is overwritten; and the masks over it."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.core.tree import lineage
from draftproof.models.cache import BUCKET, SlotCache
from draftproof.models.masks import chain_view, tree_view
from draftproof.models.toy import Toy
from models.reference import branch

CPU = torch.device("cpu")


@torch.inference_mode()
def written(cache, tokens):
    """Write each token as its own key in every layer, in inference mode as a model's pass does."""
    tokens = torch.tensor(tokens)
    cache.open(tokens.shape[1])
    states = tokens[:, None, :, None].float()
    for index, layer in enumerate(cache.layers):
        layer.update(states + 1000 * index, -states)


def cached_tokens(cache, layer=0):
    keys = cache.layers[layer].keys[:, :, 0, 0]
    return [keys[row, :length].int().tolist() for row, length in enumerate(cache.lengths.tolist())]


def test_a_pass_changes_no_length():
    cache = SlotCache(1, 2, 0, CPU)
    written(cache, [[1, 2, 3], [4, 5, 6]])
    assert cache.lengths.tolist() == [0, 0]


def test_what_is_not_kept_is_overwritten():
    cache = SlotCache(2, 2, 0, CPU)
    written(cache, [[1, 2, 3], [4, 5, 6]])
    cache.keep(torch.tensor([1, 3]))
    written(cache, [[7, 8], [9, 10]])
    cache.keep(torch.tensor([2, 0]))
    assert cached_tokens(cache) == [[1, 7, 8], [4, 5, 6]]
    assert cached_tokens(cache, layer=1) == [[1001, 1007, 1008], [1004, 1005, 1006]]


def test_buffers_are_freed_with_their_cache():
    """Without a garbage collection: on a GPU they are most of the memory, and CUDA graphs are freed with them."""
    cache = SlotCache(1, 2, 0, CPU)
    written(cache, [[1, 2, 3], [4, 5, 6]])
    keys = weakref.ref(cache.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()


def test_smaller_lengths_truncate_the_rows():
    cache = SlotCache(1, 2, 0, CPU)
    written(cache, [[1, 2, 3], [4, 5, 6]])
    cache.keep(torch.tensor([3, 3]))
    cache.lengths = torch.tensor([1, 2])
    written(cache, [[7], [8]])
    cache.keep(torch.tensor([1, 1]))
    assert cached_tokens(cache) == [[1, 7], [4, 5, 8]]
    assert cache.reach == 3


def test_the_kept_slots_of_a_tree_move_next_to_its_root():
    cache = SlotCache(2, 3, 0, CPU)
    written(cache, [[1, 2], [3, 4], [5, 6]])
    cache.keep(torch.tensor([2, 1, 0]))
    written(cache, [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    cache.keep(torch.tensor([3, 2, 1]), torch.tensor([[1, 2, -1], [2, -1, -1], [-1, -1, -1]]))
    assert cached_tokens(cache) == [[1, 2, 10, 12, 13], [3, 20, 23], [30]]


def test_a_pass_attends_no_further_than_the_longest_row():
    cache = SlotCache(1, 2, 5000, CPU)
    written(cache, [[1, 2, 3], [4, 5, 6]])
    cache.keep(torch.tensor([3, 1]))
    cache.open(2)
    assert cache.reach == 5
    assert cache.capacity >= 5000


def test_buffers_grow_by_buckets_and_keep_what_they_hold():
    cache = SlotCache(1, 2, 0, CPU)
    assert cache.capacity == BUCKET
    written(cache, [list(range(BUCKET))] * 2)
    cache.keep(torch.tensor([BUCKET, 5]))
    written(cache, [[7], [8]])
    cache.keep(torch.tensor([1, 1]))
    assert cache.capacity == 2 * BUCKET
    assert cached_tokens(cache) == [[*range(BUCKET), 7], [0, 1, 2, 3, 4, 8]]


def test_rows_are_taken_in_order_and_joined_after():
    cache = SlotCache(1, 3, 0, CPU)
    written(cache, [[1, 2], [3, 4], [5, 6]])
    cache.keep(torch.tensor([2, 1, 2]))
    longer = SlotCache(1, 1, 3 * BUCKET, CPU)
    written(longer, [[9]])
    longer.keep(torch.tensor([1]))
    both = cache.take([2, 0]).join(longer)
    assert cached_tokens(both) == [[5, 6], [1, 2], [9]]
    assert both.capacity == 3 * BUCKET
    assert cached_tokens(cache) == [[1, 2], [3], [5, 6]]


@pytest.mark.parametrize("counts", [[3, 0], [-1, 0]])
def test_more_than_the_last_pass_cannot_be_kept(counts):
    cache = SlotCache(1, 2, 0, CPU)
    written(cache, [[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="must lie within the last pass's 2 tokens"):
        cache.keep(torch.tensor(counts))


def test_lengths_cannot_reach_past_what_was_written():
    cache = SlotCache(1, 2, 0, CPU)
    written(cache, [[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="nothing was written after 2"):
        cache.lengths = torch.tensor([3, 0])
    with pytest.raises(ValueError, match=r"lengths \(1,\) given for 2 rows"):
        cache.lengths = torch.tensor([1])


def test_a_cache_joins_only_its_own_kind():
    with pytest.raises(ValueError, match="other is a ToyCache: a SlotCache can be joined only with a SlotCache"):
        SlotCache(1, 1, 0, CPU).join(Toy.random(3).new_cache(1))


trees = st.integers(0, 8).flatmap(lambda k: st.tuples(*(st.integers(-1, slot - 1) for slot in range(k))))


@given(trees)
def test_lineage_is_the_path_up_to_the_root(parents):
    up = lineage(torch.tensor([parents], dtype=torch.long).view(1, -1))[0]
    for slot in range(-1, len(parents)):
        expected = {0} | {above + 1 for above in branch(list(parents), slot)}
        assert set(up[slot + 1].nonzero().flatten().tolist()) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 5), st.integers(1, 9))
def test_a_tree_without_branches_is_a_chain(lengths, width, window):
    slots = torch.tensor(lengths)[:, None] + torch.arange(width + 1)
    reach = int(slots.max()) + 1
    straight = torch.arange(width).expand(len(lengths), -1) - 1
    one, other = chain_view(slots, reach), tree_view(slots, reach, straight)
    assert torch.equal(one.positions, other.positions)
    assert torch.equal(one.visible, other.visible)
    assert torch.equal(one.windowed(window).visible, other.windowed(window).visible)
    assert torch.equal(one.chunked(window).visible, other.chunked(window).visible)
