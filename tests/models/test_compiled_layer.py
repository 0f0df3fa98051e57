"""The compiled call attends as torch does, row by row, and a row's bits do not depend on its neighbours."""

import math

import pytest
import torch

from draftproof.models import packed
from draftproof.models.packed import Divided, PackedPass, Span, attend, divide

pytest.importorskip("numba")
HEADS, SHARED, SIZE = 6, 2, 32
TREE = torch.tensor([-1, 0, 0, 2])


def tensors(spans, seed=0):
    """Return queries, keys and values of a pass, laid out as transformers and the pool lay them out."""
    rng = torch.Generator().manual_seed(seed)
    slots, tokens = max(span.start + span.stop for span in spans), sum(span.width for span in spans)
    query = torch.randn((1, tokens, HEADS, SIZE), generator=rng).transpose(1, 2)
    keys, values = (torch.randn((slots, SHARED, SIZE), generator=rng).transpose(0, 1)[None] for _ in range(2))
    return query, keys, values


def pieces(spans, kind=("full_attention", None)):
    tokens = torch.zeros(sum(span.width for span in spans), dtype=torch.long)
    return PackedPass(tokens, spans, (kind,)).pieces(0, HEADS // SHARED, torch.float32)


SPANS = [
    Span(0, 70, 1),
    Span(128, 0, 1),
    Span(192, 3, 4),
    Span(256, 9, 5, TREE),
    Span(320, 200, 2),
    Span(576, 0, 7),
    Span(640, 15, 5),
]


@pytest.mark.parametrize("kind", [("full_attention", None), ("sliding_attention", 8), ("chunked_attention", 16)])
def test_it_attends_as_torch_does(kind):
    work, given = pieces(SPANS, kind), tensors(SPANS)
    divided = divide(work, *given)
    assert divided.few is not None
    assert (divided.many is not None) == (kind[0] != "chunked_attention" and packed.fewest_lanes() < math.inf)
    assert not divided.others
    difference = attend(divided, *given, 0.2) - attend(Divided(None, None, work), *given, 0.2)
    assert difference.abs().max() < 2e-6
    wrong = attend(divided, *given, 0.21) - attend(Divided(None, None, work), *given, 0.2)
    assert wrong.abs().max() > 1e-3  # the control: another scale is seen


def test_the_usual_scale_is_that_of_torch():
    work, given = pieces(SPANS), tensors(SPANS)
    assert (attend(work, *given) - attend(Divided(None, None, work), *given)).abs().max() < 2e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(threads):
    given, before = tensors(SPANS), torch.get_num_threads()
    together, first = attend(pieces(SPANS), *given), 0
    torch.set_num_threads(threads)
    try:
        for span in SPANS:
            own = given[0][:, :, first : first + span.width]
            alone = attend(pieces([span]), own, *given[1:])
            assert torch.equal(alone, together[:, first : first + span.width])
            first += span.width
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_compute_is_left_to_torch():
    large, few = Span(0, 2000, 5, TREE), Span(2112, 5, 1)
    given = tensors([large, few])
    divided = divide(pieces([large, few]), *given)
    assert [piece.width for piece in divided.others] == [5]
    assert divide(pieces([few]), *(each.double() for each in given)).few is None
    assert divide(pieces([few]), *given, plain=False).few is None  # sinks, soft caps


def test_without_numba_torch_attends(monkeypatch):
    monkeypatch.setattr(packed, "compiled_layer", lambda: None)
    work, given = pieces(SPANS), tensors(SPANS)
    assert divide(work, *given) == Divided(None, None, work)
    assert torch.equal(attend(work, *given), attend(Divided(None, None, work), *given))


def test_large_and_equal_scores():
    """Scores far apart give the value of the largest; equal scores the mean."""
    spans = [Span(0, 40, 1)]
    query, keys, values = tensors(spans)
    far = attend(pieces(spans), query * 1e4, keys, values)
    assert (far - attend(Divided(None, None, pieces(spans)), query * 1e4, keys, values)).abs().max() < 1e-5
    mean = attend(pieces(spans), query * 0, keys, values)
    assert (mean[0, 0].view(SHARED, -1, SIZE) - values[0].mean(1, keepdim=True)).abs().max() < 1e-6
