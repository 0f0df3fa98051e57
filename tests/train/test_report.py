"""The verdict on a trained head: whether it saves time, and what to do if it does not."""

import pytest

from draftproof.train.report import HELPFUL_TOKENS_PER_PASS, summary, verdict


def counted(**per_pass):
    figures = {"tokens_per_pass": {name: {"all": value, "code": 9.0} for name, value in per_pass.items()}}
    return {**figures, "verdict": verdict(figures, 0.7)}


def test_a_head_of_one_token_a_pass_does_not_help_yet():
    figures = counted(warm=1.0, greedy=1.02)
    assert figures["verdict"]["helps"] is False
    assert figures["verdict"]["tokens_per_pass"] == 1.02
    assert "does not help yet: 1.02 tokens per pass at best" in summary(figures)
    assert "--resume --minutes 30" in summary(figures)
    assert "code" in summary(figures)


def test_a_head_that_helps_under_one_sampling_helps():
    figures = counted(warm=1.1, greedy=HELPFUL_TOKENS_PER_PASS)
    assert figures["verdict"]["helps"] is True
    assert figures["verdict"]["advice"] == ""
    assert "help" not in summary(figures)


def test_without_counts_the_tokens_per_pass_are_estimated_from_drafts_of_four():
    accepted = [0.5, 0.5, 0.4, 0.0, 1.0]
    made = verdict({"held_out": {"accepted": accepted}}, 10.0)
    assert made["tokens_per_pass"] == pytest.approx(1 + 0.5 + 0.25 + 0.1)
    assert made["helps"] is True
    assert made["counted"] is False
    poor = verdict({"held_out": {"accepted": [0.1, 0.1]}}, 10.0)
    assert "1.11 tokens per pass at best (estimated)" in poor["advice"]
    assert "--minutes 40" in poor["advice"]
