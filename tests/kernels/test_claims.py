"""What explains a difference between kernel and reference: rounding does, a wrong token does not."""

import pytest
import torch

from kernels import claims
from kernels.twins import make, reference

V = 2048


@pytest.mark.parametrize("rule", claims.RULES)
def test_only_verdicts_on_a_border_are_explained(rule):
    samplings = [claims.SETTINGS["large top-k"], claims.SETTINGS["temperature"], claims.SETTINGS["top-p"]]
    given = make(samplings, V=V, drafts=[claims.WARM] * len(samplings), seed=1)
    for b, tokens in enumerate(reference(given, rule).tokens):
        one = claims.some(given, torch.tensor([b]))
        assert claims.explained(one, tokens, rule)
        wrong = tokens.clone()
        wrong[(tokens >= 0).nonzero()[-1]] = (tokens.max() + 1) % V
        assert not claims.explained(one, wrong, rule)
