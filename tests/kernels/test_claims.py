"""Test what explains a difference between kernel and reference: rounding does, a wrong token does not."""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from kernels import claims
from kernels.side_by_side import make, reference

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


@pytest.mark.parametrize(("apart", "expected"), [(4e-8, True), (1e-5, False)])
def test_the_border_of_a_nucleus_may_be_rounded_as_float32_sums_are(apart, expected):
    """The nucleus of a flat row ends where its mass is `apart` from top-p.

    Whether one token more is in it changes what is drawn; rounding explains that in the one case and not in the other.
    """
    given = make([dp.SamplingParams()] * 400, K=1, V=V, seed=2, spread=0.5)
    target, nothing = given.target[:1].expand(400, -1, -1), torch.zeros_like(given.lengths)
    dist = dp.warp(target[:1].double(), [dp.SamplingParams()])
    border = dist.probs()[0, 0].sort(descending=True).values.cumsum(0)[V // 2].item()
    given = replace(given, target=target, lengths=nothing)
    below, above = (
        replace(given, samplings=[dp.SamplingParams(top_p=top_p)] * 400) for top_p in (border, border + apart)
    )
    got, want = (reference(replace(x, target=x.target.double()), "token").tokens for x in (below, above))
    rows = (got != want).any(1).nonzero()[:, 0]
    assert len(rows) > 3
    assert {claims.explained(claims.some(above, row[None]), got[row], "token") for row in rows[:4]} == {expected}
