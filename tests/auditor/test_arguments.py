"""A wrong argument of `audit` is refused by its name before anything is decoded, never read as a biased decoder."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from auditor.toy_decoder import Speaker, pair
from draftproof.auditor.api import audit
from draftproof.auditor.reference import ReferenceModel
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

TARGET, DRAFT = pair(24, noise=2.0)
PROMPTS = [[3, 1], [7, 2, 7]]
HOW = {"sampling": SamplingParams(), "drafter": DRAFT, "bias": 0.1, "length": 16, "batch": 100, "max_tokens": 1_600}


class Never:
    """A decoder that must not be called."""

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        raise AssertionError("a wrong argument was noticed too late")


WRONG = [
    ("tolerance", -1, r"tolerance must be a finite number ≥ 0.*got -1"),
    ("tolerance", math.nan, "tolerance must be a finite number ≥ 0"),
    ("tolerance", math.inf, "tolerance must be a finite number ≥ 0"),
    ("tolerance", "small", "tolerance must be a finite number ≥ 0.*got 'small'"),
    ("alpha", 0.0, "alpha must be a number between 0 and 1, both excluded; got 0.0"),
    ("alpha", 1, "alpha must be a number between 0 and 1"),
    ("alpha", math.nan, "alpha must be a number between 0 and 1"),
    ("alpha", True, "alpha must be a number between 0 and 1"),
    ("bias", 1.0, "bias must be a number between 0 and 1"),
    ("bias", "0.02", "bias must be a number between 0 and 1, both excluded; got '0.02'"),
    ("method", "foo", "method must be one of 'auto', 'joint', 'bets', 'greedy'; got 'foo'$"),
    ("method", "bet", "got 'bet'; did you mean 'bets'"),
    ("method", None, "method must be one of"),
    ("method", "joint", "vocabularies up to 16; this one has 24"),
    ("method", "greedy", "needs temperature 0"),
    ("max_tokens", 0, "max_tokens must be ≥ 1"),
    ("max_tokens", 1e4, "max_tokens must be ≥ 1, a whole number, or None for the default; got 10000.0"),
    ("length", -3, "length must be ≥ 1"),
    ("length", True, "length must be ≥ 1"),
    ("batch", 2.5, "batch must be ≥ 1, a whole number"),
    ("seed", 1.5, "seed must be a whole number"),
    ("seed", None, "seed must be a whole number"),
    ("seed", 2**63, r"seed must be a whole number from -2\*\*63 to 2\*\*62 - 1"),
    ("ends", 2, r"ends must be token ids ≥ 0, as in \(2,\)"),
    ("ends", "2", "ends must be token ids"),
    ("ends", [-1], "ends must be token ids ≥ 0"),
    ("sampling", {"temperature": 0.8}, "sampling must be SamplingParams, .*got {'temperature': 0.8} .dict"),
    ("sampling", SamplingParams(logit_bias={24: 1.0}), "logit_bias has token 24: .*the ids 0 to 23"),
    ("drafter", 5, "drafter must be a draft model"),
    ("drafter", "ngramm", "got 'ngramm'; did you mean 'ngram'"),
    ("resume", "audit.json", "resume must be a Certificate, such as Certificate.load"),
    ("watch", 3, "watch must be a function"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{name}={value!r:.20}" for name, value, _ in WRONG])
def test_a_wrong_argument_is_refused_by_name_before_anything_is_decoded(name, value, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        audit(Never(), TARGET, PROMPTS, **{**HOW, name: value})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must be lists of token ids, at least one; got none"),
        ([[3], []], "prompt 1 is empty"),
        ("the fox", r"prompts must be lists of token ids; got 'the fox': encode text with .*tokenizer\(text\)"),
        (["the fox"], r"prompt 0 is 'the fox': encode text with the target's tokenizer: tokenizer\(text\)"),
        ([[{"role": "user", "content": "hi"}]], r"prompt 0 has {'role'.*apply_chat_template\(messages"),
        ({"input_ids": [[1]]}, "prompts must be lists of token ids; got {'input_ids'"),
        ([3, 1], r"prompt 0 is the number 3: write \[\[1, 2, 3\]\]"),
        ([[3, 1.5]], "prompt 0 has 1.5 at 1"),
        ([[3, 1], [3, 24]], "prompt 1 has token 24 at 1: the target's vocabulary has the ids 0 to 23"),
        ([[-1]], "prompt 0 has token -1 at 0"),
        (None, "prompts must be lists of token ids; got None"),
    ],
)
def test_prompts_that_are_not_token_ids_are_refused_and_the_message_says_how_to_get_them(prompts, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        audit(Never(), TARGET, prompts, **HOW)


def test_an_object_that_does_not_decode_is_refused():
    with unchecked(), pytest.raises(ValueError, match=r"decoder must have a method decode.*got 'engine'"):
        audit("engine", TARGET, PROMPTS, **HOW)


@pytest.mark.parametrize("method", ["joint", "bets"])
def test_greedy_decoding_is_not_audited_by_another_method_in_silence(method):
    with pytest.raises(ValueError, match=f'method="{method}" needs a temperature above 0'):
        audit(Never(), TARGET, PROMPTS, **{**HOW, "sampling": SamplingParams(temperature=0), "method": method})


def test_the_tolerance_of_a_reference_model_is_its_own():
    with pytest.raises(ValueError, match=r"set its tolerance in ReferenceModel\(…, tolerance=0.1\)"):
        audit(Never(), ReferenceModel(TARGET), PROMPTS, **HOW, tolerance=0.1)
    with pytest.raises(ValueError, match="tolerance must be a finite number"):
        ReferenceModel(TARGET, tolerance=-1e-3)


@pytest.mark.parametrize("tolerance", [None, 0.0, 1e-9, 0.05])
def test_no_tolerance_that_is_accepted_makes_an_exact_decoder_biased(tolerance):
    """α = 1e-6, 1,600 tokens, fixed seeds. A negative tolerance paid every bet for being placed."""
    found = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW, tolerance=tolerance)
    assert found.verdict != "biased"
    wrong = audit(Speaker(TARGET, DRAFT, mixed=0.9), TARGET, PROMPTS, **HOW, tolerance=tolerance)
    assert wrong.verdict == "biased"


def test_numbers_and_prompts_of_numpy_and_torch_are_taken_and_saved_as_plain_ones():
    plain = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW)
    with unchecked():
        found = audit(
            Speaker(TARGET, DRAFT), TARGET, [torch.tensor([3, 1]), np.array([7, 2, 7])],
            **{**HOW, "bias": np.float64(0.1), "batch": np.int64(100), "max_tokens": torch.tensor(1_600)},
        )  # fmt: skip
    assert found.as_json() == plain.as_json()
    with unchecked():
        assert audit(Speaker(TARGET, DRAFT), TARGET, [torch.tensor([3])], **HOW).asked["prompts"] == [[3]]


class Returns:
    """A decoder that returns these samples for every prompt."""

    def __init__(self, sample):
        self.sample = sample

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        return [self.sample] * len(prompts)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 2], "text 0: the decoder must return samples with `tokens` and `rounds`.*got a list"),
        (SimpleNamespace(tokens=(1, 2.5), rounds=None), "text 0: the decoder's tokens must be whole numbers"),
    ],
)
def test_what_a_decoder_must_return_is_said(sample, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        audit(Returns(sample), TARGET, PROMPTS, **HOW)
