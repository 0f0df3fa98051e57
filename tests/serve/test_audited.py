"""The server under audit, over HTTP and with many requests at a time."""

import pytest
from transformers import AutoModelForCausalLM

from draftproof.auditor.api import audit
from draftproof.auditor.decoders import maker
from draftproof.core.sampling import SamplingParams


class Hot:
    """The control: a server that is asked for another temperature than the audit assumes."""

    def __init__(self, decoder):
        self.decoder = decoder

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        return self.decoder.decode(prompts, SamplingParams(), max_tokens=max_tokens, seeds=seeds)


@pytest.fixture(scope="module")
def target(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.statistical
class TestAudited:
    """α = 1e-6, fixed seeds. Drafts are n-grams, 16 requests at a time.

    A mixture of 0.1 with the copied token would be found nine times in ten in the tokens that the audit takes; the
    control has temperature 1 in place of 0.7.
    """

    def certificate(self, server, target, make=lambda decoder: decoder):
        decoder = make(maker("openai")(server.url, concurrency=16, ends=tuple(server.engine.eos)))
        prompts = [server.engine.tokenizer.encode("the fox and the fox and the fox" + " and" * n) for n in range(8)]
        options = {"sampling": SamplingParams(temperature=0.7), "drafter": "ngram", "bias": 0.1, "max_tokens": 6_000}
        return audit(decoder, target, prompts, **options, length=32, batch=32, ends=tuple(server.engine.eos))

    def test_the_server_is_cleared_by_its_own_rounds(self, server, target):
        found = self.certificate(server, target)
        assert found.verdict == "no bias found", str(found)
        assert found.tested["served by"] == "draftproof"
        assert found.coverage.source == "trace"
        assert found.coverage.rejected > 50

    def test_a_server_at_another_temperature_is_not(self, server, target):
        assert self.certificate(server, target, Hot).verdict == "biased"
