"""Test counts against a distribution by a G-test that pools small cells and fails outright on the impossible."""

import torch
from scipy.stats import chi2
from torch import Tensor


def g_test(seen: Tensor, dist: Tensor, smallest: float = 5.0) -> float:
    """Return the p-value of these counts under this distribution, or 0 if something impossible was seen.

    The distribution is normalised here. Cells with fewer than `smallest` expected counts are pooled into one.
    """
    seen, dist = seen.double().flatten(), dist.double().flatten()
    dist = dist / dist.sum()
    if bool((seen[dist <= 0] > 0).any()):
        return 0.0
    expected = dist * seen.sum()
    small = expected < smallest
    seen = torch.cat([seen[~small], seen[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    g = 2 * torch.special.xlogy(seen, seen / expected).sum()
    return float(chi2.sf(float(g), max(1, len(seen) - 1)))
