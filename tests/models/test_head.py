"""A head's network: one pass, several passes, ragged rows and trees all give the same states."""

import pytest
import torch

from draftproof.models.head.network import Head, HeadShape, attend, rotate

SHAPE = HeadShape(
    hidden=16, heads=4, kv_heads=2, head_dim=6, intermediate=24, rope_theta=100.0, eps=1e-6, taps=(1, 2, 4)
)
HEAD = Head(SHAPE).requires_grad_(False)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def span(start: int, n: int, rows: int = 1) -> torch.Tensor:
    return torch.arange(start, start + n).expand(rows, n)


def causal(embedded: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Compute whole rows without a cache, as training does, with attention written out."""
    n = embedded.shape[1]
    q, k, v = HEAD.heads(embedded, h, span(0, n))
    k, v = (part.repeat_interleave(SHAPE.heads // SHAPE.kv_heads, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / SHAPE.head_dim**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return HEAD.rest(h, scores.softmax(-1) @ v)


def test_one_pass_over_a_cache_is_a_pass_without_one():
    embedded, h = numbers(3, 7, 16), numbers(3, 7, 16, seed=1)
    made = HEAD.step(embedded, h, span(0, 7, 3), HEAD.new_cache(3))
    torch.testing.assert_close(made, causal(embedded, h))


def test_step_by_step_is_one_pass():
    embedded, h, cache = numbers(2, 7, 16), numbers(2, 7, 16, seed=1), HEAD.new_cache(2)
    parts = [(0, 4), (4, 5), (5, 7)]
    made = [HEAD.step(embedded[:, a:b], h[:, a:b], span(a, b - a, 2), cache, reach=b) for a, b in parts]
    torch.testing.assert_close(torch.cat(made, 1), causal(embedded, h))


def test_rows_of_different_lengths_do_not_see_each_others_padding():
    embedded, h = numbers(2, 9, 16), numbers(2, 9, 16, seed=1)
    whole, cache = causal(embedded, h), HEAD.new_cache(2)
    HEAD.step(embedded[:, :6], h[:, :6], span(0, 6, 2), cache)  # of the second row only 3 are real
    starts = torch.tensor([6, 3])
    rest = [torch.stack([part[b, s : s + 3] for b, s in enumerate(starts)]) for part in (embedded, h)]
    made = HEAD.step(rest[0], rest[1], starts[:, None] + torch.arange(3), cache)
    torch.testing.assert_close(made[0], whole[0, 6:9])
    torch.testing.assert_close(made[1], whole[1, 3:6])


def test_drafted_states_are_overwritten():
    embedded, h, cache = numbers(1, 8, 16), numbers(1, 8, 16, seed=1), HEAD.new_cache(1)
    HEAD.step(embedded[:, :5], h[:, :5], span(0, 5), cache)
    HEAD.step(numbers(1, 3, 16, seed=2), numbers(1, 3, 16, seed=3), span(5, 3), cache)
    made = HEAD.step(embedded[:, 5:], h[:, 5:], span(5, 3), cache)
    torch.testing.assert_close(made, causal(embedded, h)[:, 5:])


def test_a_node_of_a_tree_sees_its_ancestors_alone():
    embedded, h, cache = numbers(1, 6, 16), numbers(1, 6, 16, seed=1), HEAD.new_cache(1)
    HEAD.step(embedded[:, :4], h[:, :4], span(0, 4), cache)
    sibling = numbers(1, 1, 16, seed=5)
    pair = torch.cat([embedded[:, 4:5], sibling], 1), torch.cat([h[:, 4:5], sibling], 1)
    visible = torch.tensor([[[True] * 4 + [True, False], [True] * 4 + [False, True]]])
    made = HEAD.step(*pair, torch.tensor([[4, 4]]), cache, slots=span(4, 2), visible=visible)
    torch.testing.assert_close(made[:, :1], causal(embedded, h)[:, 4:5])
    seen = torch.tensor([[[True] * 5 + [False, True]]])
    child = HEAD.step(embedded[:, 5:], h[:, 5:], span(5, 1), cache, slots=span(6, 1), visible=seen)
    torch.testing.assert_close(child, causal(embedded, h)[:, 5:])


def test_a_large_state_in_one_tap_does_not_dominate_the_others():
    taps = [numbers(5, 16, seed=seed) for seed in range(3)]
    fused = HEAD.fuse(taps)
    torch.testing.assert_close(HEAD.fuse([taps[0] * 1000, taps[1], taps[2]]), fused, atol=1e-4, rtol=1e-4)
    assert fused.shape == (5, 16)


def test_positions_are_relative():
    q, k = numbers(1, 2, 1, 6), numbers(1, 2, 1, 6, seed=1)

    def score(at: int, other: int) -> torch.Tensor:
        return (rotate(q, span(at, 1), HEAD.frequencies) * rotate(k, span(other, 1), HEAD.frequencies)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-3


def test_heads_that_share_keys_are_folded_in_order():
    q, k, v = numbers(2, 4, 3, 6), numbers(2, 2, 5, 6, seed=1), numbers(2, 2, 5, 6, seed=2)
    each = [attend(q[:, i : i + 1], k[:, i // 2 : i // 2 + 1], v[:, i // 2 : i // 2 + 1], None) for i in range(4)]
    torch.testing.assert_close(attend(q, k, v, None), torch.cat(each, 1))


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    torch.rand(3)
    assert torch.equal(Head(SHAPE, seed=4).fc.weight, Head(SHAPE, seed=4).fc.weight)
    assert not torch.equal(Head(SHAPE, seed=4).fc.weight, Head(SHAPE, seed=5).fc.weight)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"taps": ()}, "at least one"), ({"heads": 3}, "multiple of kv_heads=2"), ({"head_dim": 5}, "must be even")],
)
def test_an_impossible_shape_is_refused(wrong, message):
    sizes = {field: getattr(SHAPE, field) for field in SHAPE.__dataclass_fields__} | wrong
    with pytest.raises(ValueError, match=message):
        HeadShape(**sizes)
