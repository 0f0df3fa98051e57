"""The smallest bias that a certificate claims would have been seen is seen, nine times in ten in as many tokens."""

import pytest

from auditor.toy_decoder import Speaker, pair
from draftproof.auditor.api import audit
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

pytestmark = pytest.mark.statistical

TARGET, DRAFT = pair(24, noise=2.0)
AUDITS = 24
HOW = {"sampling": SamplingParams(), "drafter": DRAFT, "length": 16, "method": "bets"}


def found(mixed: float, tokens: int) -> int:
    """Count how many of AUDITS audits find a decoder that draws this share of its tokens from the drafter."""
    wrong = Speaker(TARGET, DRAFT, mixed=mixed)
    certificates = [
        audit(wrong, TARGET, [[3, 1]], **HOW, batch=tokens // 16, max_tokens=tokens, seed=10_000_000 * (i + 1))
        for i in range(AUDITS)
    ]
    return sum(certificate.verdict == "biased" for certificate in certificates)


def test_the_claimed_bias_is_found():
    """At a chance of 0.9 each, fewer than 13 of 24 are found with a chance of 8.5e-7. A third of the bias must not be
    found as often: it has a ninth of the growth."""
    with unchecked():
        clean = audit(Speaker(TARGET, DRAFT), TARGET, [[3, 1]], **HOW, bias=0.1, batch=20)
        assert clean.verdict == "no bias found"
        assert clean.smallest_bias is not None
        assert found(clean.smallest_bias, clean.tokens) >= 13
        assert found(clean.smallest_bias / 3, clean.tokens) < 13
