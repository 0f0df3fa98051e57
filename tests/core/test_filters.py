"""`largest` and `argmax` agree with sorting, for ties, infinities and NaN too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.core.filters import FOLD_BELOW, FOLDS, argmax, largest

SPECIAL = [0.0, 1.0, -1.0, 2.5, -math.inf, math.inf, math.nan]


def rows(R: int, seed: int, kinds: int | None = None) -> torch.Tensor:
    """Return three rows of random numbers, or of a few special values with many ties."""
    rng = torch.Generator().manual_seed(seed)
    if kinds is None:
        return torch.randn(3, R, generator=rng)
    return torch.tensor(SPECIAL[:kinds])[torch.randint(kinds, (3, R), generator=rng)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 60), st.integers(0, 99), st.sampled_from([None, 1, 2, 5, 6]))
def test_the_largest_are_those_that_sorting_finds(R, k, seed, kinds):
    logits, k = rows(R, seed, kinds), min(k, R)
    assert torch.equal(largest(logits, k), logits.sort(descending=True).values[:, :k])


@pytest.mark.parametrize("R", [FOLDS * FOLD_BELOW * 9, FOLDS * FOLD_BELOW * 9 + 5])
def test_folding_finds_the_largest_in_one_column_and_after_the_last_column(R):
    """Eight of the nine largest are in one column, the other is the last of the row; k = 9 is folded at this size."""
    logits = rows(R, 0)
    logits[:, : R // FOLDS * FOLDS : R // FOLDS][:, :8] = 50 + torch.arange(8.0)
    logits[:, -1] = 99
    assert largest(logits, 9).tolist() == [[99, *range(57, 49, -1)]] * 3


def test_nan_is_the_largest_of_all():
    logits = rows(FOLDS * 100, 1)
    logits[1, 77] = math.nan
    assert largest(logits, 5)[:, 0].isnan().tolist() == [False, True, False]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 99), st.sampled_from([None, 1, 3, 6, 7]))
def test_argmax_returns_the_first_maximum(R, seed, kinds):
    logits = rows(R, seed, kinds)
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert argmax(logits).dtype == torch.long
