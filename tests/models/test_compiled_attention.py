"""Attention with queries as lanes: torch's results, and bits that depend on a query's own position alone."""

import math

import pytest
import torch

from draftproof.models import packed
from draftproof.models.packed import Divided, PackedPass, Span, attend, divide

pytest.importorskip("numba")
if packed.fewest_lanes() == math.inf:
    pytest.skip("needs AVX-512", allow_module_level=True)

FULL, WINDOW = ("full_attention", None), ("sliding_attention", 70)


def tensors(tokens, slots, heads, shared, key_size, value_size, seed=0):
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn((1, tokens, heads, key_size), generator=rng).transpose(1, 2)
    keys = torch.randn((slots, shared, key_size), generator=rng).transpose(0, 1)[None]
    values = torch.randn((slots, shared, value_size), generator=rng).transpose(0, 1)[None]
    return query, keys, values


def pieces(spans, group, kind=FULL, dtype=torch.float32):
    tokens = torch.zeros(sum(span.width for span in spans), dtype=torch.long)
    return PackedPass(tokens, spans, (kind,)).pieces(0, group, dtype)


def attended(spans, given, kind=FULL):
    """Attend in lanes only."""
    group = given[0].shape[1] // given[1].shape[1]
    divided = divide(pieces(spans, group, kind), *given)
    assert divided.many is not None
    assert divided.few is None
    assert not divided.others
    return attend(divided, *given)


@pytest.mark.parametrize("kind", [FULL, WINDOW])
@pytest.mark.parametrize(
    ("heads", "shared", "key_size", "value_size"), [(6, 2, 64, 64), (8, 1, 80, 48), (4, 4, 16, 20), (16, 1, 128, 128)]
)
def test_it_attends_as_torch_does(heads, shared, key_size, value_size, kind):
    spans = [Span(0, 0, 64), Span(64, 100, 33), Span(256, 300, 17), Span(640, 63, 65), Span(800, 1, 127)]
    given = tensors(sum(span.width for span in spans), 1000, heads, shared, key_size, value_size)
    exact = pieces(spans, heads // shared, kind, torch.float64)
    reference = attend(Divided(None, None, exact), *(each.double() for each in given))
    assert (attended(spans, given, kind) - reference).abs().max() < 2e-6
    other = WINDOW if kind is FULL else FULL
    assert (attended(spans, given, other) - reference).abs().max() > 1e-3  # the control: another mask is seen


@pytest.mark.parametrize("kind", [FULL, WINDOW])
@pytest.mark.parametrize("cuts", [(8, 64, 72, 200), (100,), (16, 32, 48, 150, 201)])
def test_bits_do_not_depend_on_the_tokens_read_together(cuts, kind):
    """A span of 210 tokens, in one piece and in several; the threads share them differently."""
    query, keys, values = tensors(210, 400, 6, 2, 64, 64)
    whole = attended([Span(30, 40, 210)], (query, keys, values), kind)
    parts, before = [], torch.get_num_threads()
    for start, stop in zip((0, *cuts), (*cuts, 210), strict=True):
        torch.set_num_threads(1 + len(parts) % 2)
        own = query[:, :, start:stop]
        parts.append(attended([Span(30, 40 + start, stop - start)], (own, keys, values), kind))
    torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_what_lies_after_a_row_is_not_read_into_it():
    query, keys, values = tensors(20, 200, 6, 2, 64, 64)
    before = attended([Span(0, 50, 20)], (query, keys, values))
    keys[:, :, 70:] = values[:, :, 70:] = torch.nan
    assert torch.equal(attended([Span(0, 50, 20)], (query, keys, values)), before)
    keys[:, :, 69] = values[:, :, 69] = torch.nan  # the control: the last token's own
    assert attended([Span(0, 50, 20)], (query, keys, values))[0, -1].isnan().all()


def test_large_and_equal_scores():
    """Scores far apart give the value of the largest; equal scores the mean."""
    query, keys, values = tensors(12, 90, 6, 2, 64, 64)
    spans = [Span(0, 70, 12)]
    reference = attend(Divided(None, None, pieces(spans, 3)), query * 1e4, keys, values)
    assert (attended(spans, (query * 1e4, keys, values)) - reference).abs().max() < 1e-5
    mean = attended(spans, (query * 0, keys, values))
    assert (mean[0, -1].view(2, 3, 64) - values[0, :, :82].mean(1)[:, None]).abs().max() < 1e-6


def test_machine_code_is_made_again_when_a_file_changes_that_it_is_compiled_from(tmp_path):
    from draftproof.core.simd import stamp_of

    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("a = 1")
    second.write_text("b = 1")
    before = stamp_of(str(first), str(second))
    assert stamp_of(str(first), str(second)) == before
    second.write_text("b = 2")
    assert stamp_of(str(first), str(second)) != before
