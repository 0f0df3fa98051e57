"""lm-evaluation-harness by `local-completions` gives the log-likelihoods of its own `hf` model (`make test-serve`)."""

import pytest

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.serve

TOLERANCE = 1e-3
PAIRS = [
    ("the quick brown", " fox"),
    ("the lazy dog jumps over", " the quick brown fox"),
    ("0123", "456789"),
    ("größe", " naïve 日本"),
    ("the", " the the the"),
]


def test_log_likelihoods_are_those_of_the_hf_model(server, folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    served = LocalCompletionsAPI(
        model="tiny", base_url=f"{server.url}/v1/completions", tokenizer=folder, tokenized_requests=True, batch_size=2
    )
    local = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    ours, theirs = served.loglikelihood(requests), local.loglikelihood(requests)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=TOLERANCE)
    assert all(value < 0 for value, _ in ours)
