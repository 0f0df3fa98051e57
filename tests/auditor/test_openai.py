"""Audits of a server over HTTP: what it is asked, what is read from its answers, what is found, and clear errors."""

import time
from email.utils import formatdate

import pytest

from auditor.http_server import Fake, served
from auditor.toy_decoder import Speaker, pair
from draftproof.auditor.api import audit
from draftproof.auditor.decoders import maker
from draftproof.auditor.interface import Decoded, Decoder
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

openai = maker("openai")
WARM = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2)
TARGET, DRAFT = pair(16)


class Echo:
    """A decoder that emits its seed, the length of its prompt and the budget; slowly, so that requests overlap."""

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        time.sleep(0.02)
        return [
            Decoded((s, len(p), max_tokens), (Round(2, 1), Round(1, 0))) for p, s in zip(prompts, seeds, strict=True)
        ]


def asked(fake: Fake, sampling: SamplingParams = WARM, *, n: int = 1, max_tokens: int = 3, **options):
    with served(fake) as url:
        decoder = openai(url, **options)
        return decoder, decoder.decode([[1, 2]] * n, sampling, max_tokens=max_tokens, seeds=range(5, 5 + n))


class TestWhatIsAsked:
    def test_all_parameters_are_sent_so_that_no_default_of_the_server_counts(self):
        fake = Fake(Echo())
        decoder, samples = asked(fake)
        assert isinstance(decoder, Decoder)
        assert samples == [Decoded((5, 2, 3))]
        assert fake.paths == ["/v1/completions"]
        assert fake.bodies == [
            {
                **{"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "seed": 5, "return_token_ids": True},
                **{"temperature": 0.8, "top_k": 20, "top_p": 1.0, "min_p": 0.0},
                **{"repetition_penalty": 1.2, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            }
        ]
        asked(fake, SamplingParams(logit_bias={7: -2.0}))
        assert (fake.bodies[1]["logit_bias"], fake.bodies[1]["top_k"]) == ({"7": -2.0}, 0)

    def test_llama_cpp_is_asked_at_its_own_endpoint_in_the_references_order(self):
        fake = Fake(Echo(), owner="llamacpp")
        _, samples = asked(fake)
        assert samples == [Decoded((5, 2, 3))]
        assert fake.paths == ["/completion"]
        [body] = fake.bodies
        assert (body["repeat_penalty"], body["repeat_last_n"], body["return_tokens"]) == (1.2, -1, True)
        assert body["samplers"].index("temperature") < body["samplers"].index("top_p")

    def test_our_own_server_is_asked_for_its_rounds(self):
        _, [sample] = asked(Fake(Echo(), owner="draftproof"))
        assert sample.rounds == (Round(2, 1), Round(1, 0))

    def test_the_url_may_end_with_v1_and_the_certificate_names_server_and_model_but_no_key(self):
        with served(Fake(Echo(), models=("a", "b"), api_key="secret")) as url:
            decoder = openai(f"{url}/v1/", model="b", api_key="secret")
            assert decoder.decode([[1]], WARM, max_tokens=3, seeds=[0])[0].tokens == (0, 1, 3)
        assert decoder.description == {"url": url, "served model": "b", "served by": "vllm"}
        assert "secret" not in repr(decoder)

    def test_so_many_requests_run_at_a_time_and_answers_keep_their_order(self):
        fake = Fake(Echo())
        _, samples = asked(fake, n=12, concurrency=4)
        assert [sample.tokens[0] for sample in samples] == list(range(5, 17))
        assert fake.most_running == 4


class TestWhatGoesWrong:
    @pytest.mark.parametrize("retry", ["0.05", formatdate(0, usegmt=True)], ids=["seconds", "date"])
    def test_a_busy_server_is_asked_again(self, retry):
        fake = Fake(Echo(), busy=2, retry=retry)
        _, samples = asked(fake)
        assert samples == [Decoded((5, 2, 3))]
        assert fake.busy < 0

    def test_a_server_that_stays_busy_is_reported(self):
        with pytest.raises(RuntimeError, match=r"busy for 0\.2 seconds \(429\): full\. Ask for less at a time"):
            asked(Fake(Echo(), busy=99, retry="0.1"), timeout=0.2)
        with pytest.raises(RuntimeError, match="busy for"):  # without Retry-After the first pause is a second
            asked(Fake(Echo(), busy=99, retry=None), timeout=0.2)

    @pytest.mark.parametrize(
        ("fake", "message"),
        [
            (Fake(answer=(400, '{"error": {"message": "top_k is unknown"}}')), r"refused .*\(400\): top_k is unknown"),
            (Fake(answer=(500, '"oh"')), r'refused the request \(500\): "oh"'),
            (Fake(answer=(200, '{"choices": [{"text": "hello"}]}')), r"no token ids: .*return_token_ids.*hello"),
            (Fake(answer=(200, '{"content": "hello"}'), owner="llamacpp"), 'no token ids: it has no "tokens"'),
            (Fake(answer=(200, "[]")), "no token ids"),
        ],
    )
    def test_an_answer_without_tokens_is_an_error_that_says_what_is_needed(self, fake, message):
        with pytest.raises(RuntimeError, match=message):
            asked(fake)

    def test_a_text_without_the_token_that_ended_it_is_refused(self):
        with pytest.raises(RuntimeError, match=r"after 3 of 9 tokens, and the last is none .*\(0, 2\).*--ignore-eos"):
            asked(Fake(Echo()), max_tokens=9, ends=(0, 2))
        assert asked(Fake(Echo()), max_tokens=9, ends=(0, 9))[1] == [Decoded((5, 2, 9))]

    def test_the_model_must_be_one_that_is_served(self):
        with pytest.raises(ValueError, match=r"has 2 models \(a, b\): name the one"):
            asked(Fake(Echo(), models=("a", "b")))
        with pytest.raises(ValueError, match="no model 'c'; it has a, b"):
            asked(Fake(Echo(), models=("a", "b")), model="c")

    def test_a_key_is_asked_for(self):
        with pytest.raises(ValueError, match=r"\(401\): an API key is needed \(--api-key\)"):
            asked(Fake(Echo(), api_key="secret"))
        with pytest.raises(ValueError, match=r"\(401\): another API key"):
            asked(Fake(Echo(), api_key="secret"), api_key="wrong")

    def test_what_is_no_server_is_reported(self):
        with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:1 cannot be reached .*is it running"):
            openai("http://127.0.0.1:1")
        with pytest.raises(ValueError, match="url must begin with http"):
            openai("127.0.0.1:8000")
        with pytest.raises(ValueError, match="concurrency must be a whole number ≥ 1; got 0"):
            openai("http://127.0.0.1:1", concurrency=0)

    @pytest.mark.parametrize(
        ("owner", "fields", "message"),
        [
            ("vllm", {"min_p": 0.1, "top_p": 0.9}, "vLLM cuts by min_p before"),
            ("llamacpp", {"presence_penalty": 0.5}, "llama.cpp counts the tokens of the prompt"),
        ],
    )
    def test_parameters_that_a_server_defines_differently_are_refused(self, owner, fields, message):
        with pytest.raises(ValueError, match=message):
            asked(Fake(Echo(), owner=owner), SamplingParams(**fields))


@pytest.mark.statistical
class TestAudited:
    """α = 1e-6, fixed seeds, 16 words, texts of 16 tokens, 16 requests at a time.

    A mixture of 0.2 with the drafter's distribution would be found nine times in ten in the tokens that the exact
    server needed. The control is a server that draws from the target after a rejection, and not from the residual.
    """

    def certificate(self, decoder):
        options = {"sampling": SamplingParams(), "drafter": DRAFT, "bias": 0.2, "max_tokens": 12_000, "method": "bets"}
        with served(Fake(decoder)) as url:
            prompts = [[i, (3 * i) % 16] for i in range(8)]
            return audit(openai(url, concurrency=16), TARGET, prompts, **options, length=16, batch=64)

    def test_an_exact_server_is_cleared(self):
        found = self.certificate(Speaker(TARGET, DRAFT))
        assert found.verdict == "no bias found", str(found)
        assert found.tested["served by"] == "vllm"
        assert found.coverage.source == "replay"

    def test_a_biased_server_is_found(self):
        assert self.certificate(Speaker(TARGET, DRAFT, keep_residual=False)).verdict == "biased"
