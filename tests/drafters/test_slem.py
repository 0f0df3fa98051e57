"""SLEM drafts are the draft model's text in the target's tokens."""

import pytest
import torch

from drafters.test_model import go_on
from drafters.toy_rounds import rng_of, row
from drafters.two_vocabularies import SHARES, bpe, large_models, large_pair, overlap_of, prompts
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.reencode import Reencoder
from draftproof.drafters.slem import SLEM
from draftproof.models.hf import HFModel


def slem(share: float, **options) -> SLEM:
    return SLEM(HFModel(large_models(share)[1]), overlap_of(*large_pair(share)), **options)


@torch.no_grad()
def written(share: float, tokens: list[int], count: int) -> bytes:
    """Return what the draft model writes after these tokens of the target, greedily, by plain passes."""
    model, overlap = large_models(share)[1], overlap_of(*large_pair(share))
    [context] = Reencoder(overlap)([row(0, tokens)], lambda request, length: None)
    ids, start = list(context.tokens), len(context.tokens)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return b"".join(overlap.draft.spelled[token] for token in ids[start:])


@pytest.mark.parametrize("share", SHARES)
def test_the_draft_is_the_text_that_the_draft_model_writes_after_ragged_rounds_with_rejections(share):
    tokenizer, _ = large_pair(share)
    overlap, drafter, numbers = overlap_of(*large_pair(share)), slem(share), torch.Generator().manual_seed(0)
    rows = [row(b, tokenizer(text)["input_ids"]) for b, text in enumerate([*prompts()[:2], "x", " 日本語 👍🏽"])]
    for i in range(3):
        draft = drafter.propose(rows, [6 - (b + i) % 3 for b in range(4)], rng_of(rows))
        assert draft.q is None
        for b, r in enumerate(rows):
            made = draft.tokens[b, : int(draft.lengths[b])].tolist()
            text = b"".join(overlap.target.spelled[token] for token in made)
            assert text
            assert written(share, r.tokens, 6).startswith(text)
        go_on(rows, draft, numbers)


class Writes:
    """A stand-in for the draft model that writes the same tokens after every text."""

    def __init__(self, written: list[int]) -> None:
        self.written = written

    def truncate(self, request: int, length: int) -> None:
        pass

    def propose(self, contexts, k, rng) -> Draft:
        tokens = [self.written[:most] for most in k]
        return Draft(torch.tensor(tokens), torch.tensor([len(each) for each in tokens]))


def drafting(text: str, draft_text: str, most: int = 8) -> list[str]:
    """Return the words that are drafted after a text if the draft model writes the given one."""
    drafter = slem(0.7)
    overlap = overlap_of(*large_pair(0.7))
    drafter._drafter = Writes(overlap.draft.encode(draft_text.encode()))
    rows = [row(0, overlap.target.encode(text.encode()))]
    draft = drafter.propose(rows, [most], rng_of(rows))
    return large_pair(0.7)[0].convert_ids_to_tokens(draft.tokens[0].tolist())


def test_text_is_encoded_together_with_the_word_it_continues():
    tokenizer = large_pair(0.7)[0]
    whole = tokenizer.tokenize("what is the")
    assert drafting("what is", " the") == whole[len(tokenizer.tokenize("what is")) :]


def test_text_that_would_change_the_last_word_is_encoded_alone():
    """ "refriger" is no prefix of the tokens of "refrigerator" unless a token ends there."""
    assert "".join(drafting("refriger", "ator")) == "ator"
    assert "".join(drafting("th", "e fox")) == "eĠfox"


def test_a_character_split_between_kept_text_and_draft_is_completed():
    overlap = overlap_of(*large_pair(0.7))
    first, *rest = "é".encode()
    [lead] = overlap.target.encode(bytes([first]))
    drafter = slem(0.7)
    drafter._drafter = Writes(overlap.draft.encode(bytes(rest)))
    rows = [row(0, [lead])]
    draft = drafter.propose(rows, [4], rng_of(rows))
    assert b"".join(overlap.target.spelled[t] for t in [lead, *draft.tokens[0].tolist()]) == "é".encode()


def test_a_special_token_ends_the_draft_and_is_drafted_if_the_target_has_its_role():
    one, other = bpe(["the fox"] * 3, 12), bpe(["the fox"] * 3, 12)
    one.add_special_tokens({"eos_token": "<end>"})
    other.add_special_tokens({"eos_token": "</s>", "sep_token": "<sep>"})
    overlap = overlap_of(one, other)
    the = other("the")["input_ids"]
    for special, wanted in ((other.eos_token_id, [one.eos_token_id]), (other.sep_token_id, [])):
        drafter = SLEM(HFModel(large_models(0.2)[1]), overlap)
        drafter._drafter = Writes([*the, special, *the])
        rows = [row(0, one(" fox")["input_ids"])]
        draft = drafter.propose(rows, [8], rng_of(rows))
        assert draft.tokens[0].tolist() == [*one("the")["input_ids"], *wanted]


def test_no_more_tokens_are_drafted_than_asked_for():
    assert len(drafting("what is", " the quick brown fox jumps", most=2)) == 2


def test_a_greedy_only_drafter_refuses_sampling_with_the_overlap_and_the_ways_out():
    drafter = slem(0.7, greedy_only=True)
    drafter.check_sampling(SamplingParams(temperature=0))
    with pytest.raises(
        ValueError, match=r'has 69\.2 % of .* at temperature 0\.5: ask for temperature=0, .*"slem:MODEL"'
    ):
        drafter.check_sampling(SamplingParams(temperature=0.5))
    slem(0.7).check_sampling(SamplingParams(temperature=0.5))
