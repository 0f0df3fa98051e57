"""Hybrid and recurrent targets in the engine: greedy texts, joint distributions, rows that come and go, MTP layers.

The joint distribution of three tokens after four prompts of different lengths, in one ragged batch, is tested by
G-test: α = 1e-6, fixed seeds; 1000 texts over 256 cells find a total variation of about 0.2. The control, a rollback
that forgets to restore the states, fails with as many.
"""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD, Draft
from draftproof.models.hybrid import HybridModel
from draftproof.models.hybrid_cache import HybridCache
from engine.many_texts import unchecked
from engine.near_ties import count_near_ties
from engine.perfect_drafters import DOWN, UP, acceptance, continued, dflash_folder, eagle3_folder, target
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import llama
from g_test import g_test
from models.hybrid_families import QUICK, SERVED, hybrid
from models.mtp_checkpoints import write
from models.test_recurrent import forget_to_restore

PROMPTS = [[3], [1, 2, 3, 0, 1], [5, 5, 2, 1, 0, 7, 6, 3, 2], [4, 0, 4]]
LENGTHS = [17, 9, 14, 21]
ALPHA, WARM = 1e-6, SamplingParams(temperature=0.8)
DEPTH = 3
STEPS_DIFFER = ("nemotron_h", "zamba2")
"""transformers' steps over one token ignore the limit of time steps: their plain text is taken without a cache."""

families = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]
)


def plain_text(model, name, prompt, length):
    """Return transformers' own greedy text."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        use_cache=name not in STEPS_DIFFER,
    )
    return made[0, len(prompt) :].tolist()


@torch.no_grad()
def margin(model, text):
    best = model(torch.tensor([text]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


class WrongAtEveryDepth:
    """Drafts the texts that it was given, with one token spoilt: at another depth in every row and round."""

    def __init__(self, prompts, texts):
        self.texts = {tuple(prompt): [*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)}
        self.rounds, self.depths = 0, set()

    def propose(self, contexts, k, rng):
        rows = []
        for row, (context, most) in enumerate(zip(contexts, k, strict=True)):
            text = self.texts[tuple(context.tokens[: context.prompt_length])]
            draft = text[len(context.tokens) : len(context.tokens) + most]
            at = (self.rounds + row) % (DEPTH + 1)
            if at < len(draft):
                draft[at] = (draft[at] + 1) % 8
            self.depths.add(min(at, len(draft)))
            rows.append(draft)
        self.rounds += 1
        K = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (K - len(row)) for row in rows], dtype=torch.long).view(len(rows), K)
        return Draft(tokens, torch.tensor([len(row) for row in rows]))


@families
@pytest.mark.parametrize("max_batch", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_greedy_text_is_transformers_greedy_text(name, max_batch):
    """Four ragged rows with rejections at every depth; with max_batch=2, rows enter when others leave."""
    model = hybrid(name)
    texts = [plain_text(model, name, *each) for each in zip(PROMPTS, LENGTHS, strict=True)]
    drafter = WrongAtEveryDepth(PROMPTS, texts)
    engine = dp.load(model, drafter, num_draft_tokens=DEPTH, max_batch=max_batch)
    outputs = engine.generate(PROMPTS, temperature=0, max_tokens=LENGTHS)
    ties = sum(
        count_near_ties(
            output.tokens,
            lambda prefix, prompt=prompt, length=length: plain_text(
                model, name, [*prompt, *prefix], length - len(prefix)
            ),
            lambda prefix, prompt=prompt: margin(model, [*prompt, *prefix]),
        )
        for output, prompt, length in zip(outputs, PROMPTS, LENGTHS, strict=True)
    )
    assert ties <= 1
    assert drafter.depths == set(range(DEPTH + 1))
    assert sum(output.stats.accepted for output in outputs) > 20


V, TEXTS_EACH = 4, 250
SHORT = [[3], [1, 2, 3, 0, 1], [2, 0, 1, 0, 3, 3, 2, 1, 0], [0, 1, 0]]


def p_value(engine, model):
    """Return the p-value of three tokens after each of four prompts. Every text has a seed of its own."""
    prompts = SHORT * TEXTS_EACH
    samplings = [replace(WARM, seed=i * 1_000_003 + 7) for i in range(len(prompts))]
    with unchecked():
        outputs = engine.generate(prompts, samplings, max_tokens=4)
    assert 0 < sum(output.stats.accepted for output in outputs) < sum(output.stats.drafted for output in outputs)
    texts = torch.tensor([output.tokens[:3] for output in outputs])
    seen = torch.cat([counts(texts[i :: len(SHORT)], V) for i in range(len(SHORT))])
    return g_test(seen, torch.cat([joint_distribution(model, prompt, WARM, 3) for prompt in SHORT]))


def engine_for(name, rule, max_batch):
    model = hybrid(name, V, 1.5)
    return dp.load(model, llama(V), rule=rule, num_draft_tokens=DEPTH, max_batch=max_batch), model


@pytest.mark.statistical
def test_texts_have_the_targets_distribution():
    assert p_value(*engine_for("lfm2", "block", 400)) > ALPHA


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), list(zip(SERVED, cycle(["block", "token", "coupled"]), strict=False)))
def test_texts_have_the_targets_distribution_in_batches_of_four(name, rule):
    assert p_value(*engine_for(name, rule, 4)) > ALPHA


@pytest.mark.statistical
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVED if name != "lfm2")]
)
def test_a_rollback_that_forgets_to_restore_is_caught(name, monkeypatch):
    engine, model = engine_for(name, "block", 400)
    monkeypatch.setattr(HybridCache, "settle", forget_to_restore)
    assert p_value(engine, model) < ALPHA


def test_seeded_texts_and_samples_of_one_prompt():
    """Samples of one prompt each read it: nothing is reused, and nothing is preempted."""
    engine = dp.load(hybrid("lfm2"), "ngram", rule="coupled", num_draft_tokens=2)
    prompt = [1, 2, 3] * 30
    samplings = [SamplingParams(seed=seed) for seed in (1, 2, 1, 3)]
    outputs = engine.generate([prompt] * 4, samplings, max_tokens=12)
    assert outputs[0].tokens == outputs[2].tokens != outputs[1].tokens
    assert all(output.stats.cached_tokens == output.stats.preemptions == 0 for output in outputs)
    assert engine.generate(prompt, samplings[1], max_tokens=12).tokens == outputs[1].tokens


def test_a_service_with_requests_that_are_cancelled():
    engine = dp.load(hybrid("falcon_h1"), "ngram", num_draft_tokens=3, max_batch=3)
    alone = [engine.generate(prompt, temperature=0, max_tokens=20).tokens for prompt in PROMPTS]
    with engine.service() as service:
        endless = service.submit([1, 1, 2], temperature=1.0, seed=1, max_tokens=300)
        streams = [service.submit(prompt, temperature=0, max_tokens=20) for prompt in PROMPTS]
        next(iter(endless))
        endless.cancel()
        assert [stream.result().tokens for stream in streams] == alone


def test_log_probabilities_of_prompt_and_text():
    model = hybrid("qwen3_5_text")
    output = dp.load(model, "ngram").generate([1, 2, 3, 4], temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    with torch.no_grad():
        raw = model(torch.tensor([[1, 2, 3, 4, *output.tokens]]), use_cache=False).logits[0].log_softmax(-1)
    assert [each.logprob for each in output.prompt_logprobs[-3:]] == pytest.approx(
        [float(raw[i, token]) for i, token in enumerate([2, 3, 4])], abs=1e-3
    )
    assert [each.logprob for each in output.logprobs] == pytest.approx(
        [float(raw[3 + i, token]) for i, token in enumerate(output.tokens)], abs=1e-3
    )


def test_a_tree_ends_the_request_with_a_sentence():
    engine = dp.load(hybrid("lfm2"), "ngram", rule="tree")
    with pytest.raises(ValueError, match="a recurrent layer reads its tokens in one order"):
        engine.generate([1, 2, 1, 2, 1, 2, 1], max_tokens=8)


# --- Qwen's own MTP layer, which transformers cannot draft with


@pytest.fixture(scope="module", params=["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def with_mtp(request, tmp_path_factory):
    model = write(tmp_path_factory.mktemp("mtp") / "target", request.param)
    with torch.no_grad():
        model.lm_head.weight *= 1.5 / model(torch.arange(24)[None]).logits.std()
    return model


def test_qwen_drafts_with_its_own_mtp_layer(with_mtp):
    engine = dp.load(with_mtp, "mtp", num_draft_tokens=4)
    assert isinstance(engine.model, HybridModel)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
    plain = dp.load(with_mtp, None).generate(prompts, temperature=0, max_tokens=16)
    outputs = engine.generate(prompts, temperature=0, max_tokens=16)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(output.stats.drafted for output in outputs) > 50


@pytest.mark.parametrize(
    "write_to", [partial(eagle3_folder, layout="specforge"), partial(dflash_folder, layout="original")]
)
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_a_perfect_published_drafter_of_a_hybrid_is_always_accepted(write_to, rule, tmp_path):
    prompts, lengths = [[UP], [DOWN, 3], [UP, 1, 2, 5], [DOWN, 4, 4, 0]], [9, 30, 17, 24]
    engine = dp.load(target(tf.Qwen3_5ForCausalLM), write_to(tmp_path), rule=rule, num_draft_tokens=4)
    assert isinstance(engine.model, HybridModel)
    outputs = engine.generate(prompts, temperature=0.7, max_tokens=lengths)
    assert [output.tokens for output in outputs] == list(map(continued, prompts, lengths))
    assert acceptance(outputs) > 0.99


@pytest.mark.slow
@pytest.mark.statistical
def test_texts_drafted_by_mtp_have_the_targets_distribution(with_mtp):
    engine = dp.load(with_mtp, "mtp", rule="token", num_draft_tokens=2, max_batch=200)
    samplings = [replace(WARM, seed=i * 1_000_003 + 7) for i in range(2000)]
    with unchecked():
        outputs = engine.generate([[1, 2, 3]] * 2000, samplings, max_tokens=4)
    assert 0 < sum(output.stats.accepted for output in outputs) < sum(output.stats.drafted for output in outputs)
    texts = torch.tensor([output.tokens[:2] for output in outputs])
    assert g_test(counts(texts, 24), joint_distribution(with_mtp, (1, 2, 3), WARM, 2)) > ALPHA
