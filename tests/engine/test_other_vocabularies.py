"""With a draft model of another tokenizer, texts have exactly the target's distribution: three tokens, by G-test.

False alarms: α = 1e-6 per test, seeds fixed. 1500 texts over 1000 cells find a joint total variation of about 0.17, 500
texts one of 0.3. The controls are real defects and must fail with 1000 texts: logits permuted against ids (as in
transformers' universal assisted generation), and a q without the request's top-k.
"""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from budget import budgeted
from drafters.two_vocabularies import SHARES, large_models, large_pair, overlap_of, prompts, small_models, small_pair
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import InexactError
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.slem import SLEM
from draftproof.drafters.tli import TLI
from draftproof.models.compatibility import same_vocabulary
from draftproof.models.hf import HFModel
from engine.many_texts import SampledTexts, sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.test_greedy import differences
from engine.tiny import llama
from g_test import g_test

ALPHA = 1e-6
V, LENGTH, TEXTS, CONTROL_TEXTS = 10, 3, 1500, 1000
PROMPT = (4, 0, 1, 3, 2, 5, 1, 4, 0)
"""Text with a character in two tokens, and a word that the draft models encode differently."""
WARM = SamplingParams(temperature=0.8)
CUT = SamplingParams(temperature=1.2, top_k=6, top_p=0.9)
WARY = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: 1.5, 4: -0.5})


def tli(share: float, **options) -> TLI:
    return TLI(HFModel(small_models(share)[1]), overlap_of(*small_pair(share)), vocab_size=V, **options)


def slem(share: float) -> SLEM:
    return SLEM(HFModel(small_models(share)[1]), overlap_of(*small_pair(share)))


def sampled(drafter, rule: str, sampling: SamplingParams, n: int, share: float = 0.7) -> SampledTexts:
    engine = dp.load(small_models(share)[0], drafter, rule=rule, num_draft_tokens=4, max_batch=500)
    return sample_texts(engine, PROMPT, [sampling], n, length=LENGTH, budget=LENGTH + 3)


def p_value(made: SampledTexts, sampling: SamplingParams, share: float = 0.7) -> float:
    return g_test(counts(made.texts, V), joint_distribution(small_models(share)[0], PROMPT, sampling, LENGTH))


CASES = {
    **{f"TLI at {share}": (tli, share, "block", WARM) for share in SHARES},
    "TLI at 0.7, token": (tli, 0.7, "token", WARM),
    "TLI at 0.7, cut": (tli, 0.7, "block", CUT),
    "TLI at 0.7, wary": (tli, 0.7, "block", WARY),
    "TLI at 0.7, tree": (lambda share: tli(share, branches=2), 0.7, "tree", WARM),
    "TLI at 0.7, ending after weak tokens": (lambda share: tli(share, confidence=0.4), 0.7, "block", WARM),
    **{f"SLEM at {share}": (slem, share, "block", WARM) for share in SHARES},
    "SLEM at 0.7, token, cut": (slem, 0.7, "token", CUT),
}


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("make", "share", "rule", "sampling"),
    budgeted(
        list(CASES.values()),
        ["TLI at 0.2", "TLI at 0.7, tree", "TLI at 0.7, ending after weak tokens", "SLEM at 0.7"],
        list(CASES),
    ),
)
def test_texts_have_the_targets_distribution(make, share, rule, sampling):
    texts = 500 if sampling is WARY else TEXTS  # penalties are processed row by row
    made = sampled(make(share), rule, sampling, texts, share)
    assert made.drafting_mattered
    assert p_value(made, sampling, share) > ALPHA


@pytest.mark.parametrize("make", [tli, slem])
def test_coupled_texts_are_the_plain_seeded_ones(make):
    target, seeds = small_models(0.7)[0], [replace(WARM, seed=i) for i in range(6)]
    plain, drafted = (
        dp.load(target, drafter, rule="coupled", num_draft_tokens=4, max_batch=5).generate(
            [list(PROMPT[: 2 + i % 7]) for i in range(6)], seeds, max_tokens=16
        )
        for drafter in (None, make(0.7))
    )
    assert [output.tokens for output in plain] == [output.tokens for output in drafted]
    assert sum(output.stats.accepted for output in drafted) > 0


# ----------------------------------------------------------------------------------- controls: a wrong distribution


class Permuted(TLI):
    """Draws in one order of the vocabulary and declares the logits in another, as transformers 5.22 does."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        shared = sorted(self._overlap.partner)
        order = torch.arange(V).index_copy(0, torch.tensor(shared), torch.tensor(shared).roll(1))
        return replace(draft, q=replace(draft.q, logits=draft.q.logits[..., order]))


class Unfiltered(TLI):
    """Draws with the request's top-k, and declares the shared tokens' softmax without it."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        return draft if draft.q is None else replace(draft, q=warp(draft.q.logits, [SamplingParams()] * len(contexts)))


@pytest.mark.statistical
@pytest.mark.parametrize("rule", budgeted(["token", "block"], ["block"]))
@pytest.mark.parametrize(("control", "sampling"), [(Permuted, WARM), (Unfiltered, SamplingParams(top_k=2))])
def test_a_drafter_that_declares_another_distribution_is_caught(control, sampling, rule):
    share = 0.7
    drafter = control(HFModel(small_models(share)[1]), overlap_of(*small_pair(share)), vocab_size=V)
    assert p_value(sampled(drafter, rule, sampling, CONTROL_TEXTS), sampling) < ALPHA


@pytest.mark.statistical
def test_the_control_of_the_controls_is_cleared():
    sampling = SamplingParams(top_k=2)
    assert p_value(sampled(tli(0.7), "token", sampling, CONTROL_TEXTS), sampling) > ALPHA


# --------------------------------------------------------------------------------------------------- greedy and loading


@pytest.mark.parametrize("way", ["default", "tli", "slem"])
@pytest.mark.parametrize("share", SHARES)
def test_greedy_texts_of_a_ragged_batch_of_four_are_transformers_own(share, way):
    target, draft = large_models(share)
    tokenizer, draft_tokenizer = large_pair(share)
    texts = [prompts()[0], "日本語 größe 👍", "x", f"{prompts()[5]} 👍🏽 é"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    how = {"tokenizer": tokenizer, "draft_tokenizer": draft_tokenizer, "num_draft_tokens": 4}
    overlap = overlap_of(tokenizer, draft_tokenizer)
    made = {
        "tli": lambda: TLI(HFModel(draft), overlap, vocab_size=len(tokenizer)),
        "slem": lambda: SLEM(HFModel(draft), overlap),
    }
    outputs = dp.load(target, made[way]() if way in made else draft, **how).generate(rows, temperature=0, max_tokens=16)
    assert differences(target, outputs, rows) <= 1, "rounding explains one difference here, not several"
    assert sum(output.stats.drafted for output in outputs) > 0


@pytest.mark.parametrize(("share", "kind"), [(0.2, SLEM), (0.7, SLEM), (0.95, TLI)])
def test_by_default_a_large_overlap_is_drawn_from_and_a_small_one_drafts_greedy_texts_only(share, kind):
    tokenizer, draft_tokenizer = large_pair(share)
    target, draft = large_models(share)
    engine = dp.load(target, draft, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer, num_draft_tokens=2)
    assert type(engine.drafter) is kind
    prompt = tokenizer("what is")["input_ids"]
    assert engine.generate(prompt, temperature=0, max_tokens=4).stats.drafted > 0
    if kind is TLI:
        assert engine.generate(prompt, temperature=0.7, max_tokens=4).stats.drafted > 0
        return
    with pytest.raises(ValueError, match=r"has \d\d\.\d % of the target's tokens .* at temperature 0\.7"):
        engine.generate(prompt, temperature=0.7, max_tokens=4)
    good, bad = engine.generate([prompt, prompt], [SamplingParams(temperature=0), WARM], max_tokens=4)
    assert len(good.tokens) == 4
    assert bad.finish_reason == "error"


def test_a_name_chooses_the_way(tmp_path):
    tokenizer, draft_tokenizer = large_pair(0.2)
    target, draft = large_models(0.2)
    draft.save_pretrained(tmp_path)
    draft_tokenizer.save_pretrained(tmp_path)
    for way, kind in (("tli", TLI), ("slem", SLEM)):
        engine = dp.load(target, f"{way}:{tmp_path}", tokenizer=tokenizer)
        assert type(engine.drafter) is kind
        assert len(engine.generate(tokenizer("what is")["input_ids"], temperature=0.7, max_tokens=4).tokens) == 4


def test_the_same_vocabulary_is_drafted_for_as_before():
    tokenizer, _ = large_pair(0.7)
    target, _ = large_models(0.7)
    assert type(dp.load(target, target, tokenizer=tokenizer, draft_tokenizer=tokenizer).drafter) is ModelDrafter


def test_without_tokenizers_another_size_is_refused_and_a_way_too(tmp_path):
    target, draft = large_models(0.2)
    with pytest.raises(InexactError, match=r"scores 290 tokens and the target 3000: .* Pass tokenizer= and"):
        dp.load(llama(3000), draft)
    draft.save_pretrained(tmp_path)
    large_pair(0.2)[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="drafter 'tli' needs the tokenizers of both models"):
        dp.load(target, f"tli:{tmp_path}")


def test_what_is_no_tokenizer_is_refused_by_its_argument():
    tokenizer, draft_tokenizer = large_pair(0.2)
    target, draft = (HFModel(model) for model in large_models(0.2))
    with pytest.raises(ValueError, match=r"^draft_tokenizer is a str without get_vocab\(\)"):
        same_vocabulary(target, draft, tokenizer, "gpt2")
    with pytest.raises(ValueError, match=r"^tokenizer is a str without get_vocab\(\)"):
        same_vocabulary(target, draft, "gpt2", draft_tokenizer)
