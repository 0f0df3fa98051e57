"""Draft chains with a compiled head (models/head/compiled.py): all tokens of rows that are sampled alike in one call.

Rows are divided by how they are sampled, never by their neighbours, so that a row's bits are its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.core.distribution import Distribution, DraftVocab
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams, plain_temperature
from draftproof.core.types import PAD, Draft
from draftproof.drafters.build import Guess, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.switch import merged, padded_distribution, padded_tokens
from draftproof.models.head.compiled import Chain, Choice

GREEDY: Final = "greedy"
DRAWN: Final = "drawn"


@runtime_checkable
class ChainReader(Protocol):
    """The rows of a compiled head."""

    def draft(self, contexts: Sequence[Context], index: Sequence[int], choice: Choice) -> Chain:
        """Draft for the contexts with these numbers, which must be ready."""
        ...


def kind_of(sampling: SamplingParams) -> str | None:
    """Return how a compiled chain serves a row: greedy, or drawn at a temperature; None if it does not."""
    temperature = plain_temperature(sampling)
    return None if temperature is None else DRAWN if temperature else GREEDY


def draft_chain(
    reader: ChainReader,
    contexts: Sequence[Context],
    slots: Sequence[int],
    rng: Philox,
    vocab: DraftVocab,
    confidence: float,
) -> Draft:
    """Draft up to slots[b] tokens for each row in one call; rows with slots must be of one kind (see `kind_of`)."""
    index = [b for b, most in enumerate(slots) if most]
    is_whole = len(index) == len(slots)
    temperatures = [contexts[b].sampling.temperature for b in index]
    greedy, K = temperatures[0] == 0, max(slots)
    scales = torch.tensor([1.0 / t if t else 0.0 for t in temperatures], dtype=torch.float64)
    own = rng if is_whole else rng.take(torch.tensor(index))
    uniforms = torch.zeros((K, len(index), 2), dtype=torch.float64) if greedy else _uniforms(own, K)
    lengths = torch.tensor([slots[b] for b in index])
    chain = reader.draft(contexts, index, Choice(scales, uniforms, lengths, confidence))
    draft = _draft(chain, scales, vocab, greedy)
    return draft if is_whole else _spread(draft, index, len(slots))


def _uniforms(rng: Philox, K: int) -> Float[Tensor, "K B 2"]:
    """Return the random numbers of K draft tokens: two for each token and row."""
    steps = torch.arange(K)
    return rng.pairs(Purpose.DRAFT, torch.zeros_like(steps), steps).permute(2, 1, 0).contiguous()


def _draft(chain: Chain, scales: Float[Tensor, " B"], vocab: DraftVocab, greedy: bool) -> Draft:
    """Make the draft of a chain. The argmax is chosen, not drawn, and carries no distribution."""
    lengths = chain.lengths
    most = lengths.tolist()
    B, K = len(most), max(most)
    tokens = vocab.ids[chain.entries[:K].T]
    if min(most) < K:
        tokens = tokens.masked_fill(torch.arange(K) >= lengths[:, None], PAD)
    if greedy or K == 0:
        return Draft(tokens, lengths)
    q = Distribution(
        chain.logits[:K].transpose(0, 1),
        scales[:, None].expand(B, K),
        torch.full((B, K), -torch.inf),
        chain.sums[:K].T,
        torch.full((B, K), PAD),
        vocab,
        plain=True,
    )
    return Draft(tokens, lengths, q)


def _spread(draft: Draft, index: Sequence[int], rows: int) -> Draft:
    """Return the draft of all rows; those that are not in the index get no tokens."""
    if not draft.tokens.shape[1]:
        return chosen([Guess([], [])] * rows, draft.tokens.device)
    places = torch.tensor(index)
    lengths = torch.zeros(rows, dtype=torch.long).index_copy_(0, places, draft.lengths)
    tokens = torch.full((rows, draft.tokens.shape[1]), PAD).index_copy_(0, places, draft.tokens)
    if draft.q is None:
        return Draft(tokens, lengths)
    source = torch.zeros(rows, dtype=torch.long).index_copy_(0, places, torch.arange(len(index)))
    return Draft(tokens, lengths, draft.q.rows(source, draft.tokens.shape[1]))


def joined(one: Draft, other: Draft) -> Draft:
    """Join two drafts of chains row by row; in every row at least one must be empty."""
    if one.q is None or other.q is None:
        return merged(one, other) if one.q is None else merged(other, one)
    K = max(one.tokens.shape[1], other.tokens.shape[1])
    first = one.lengths > 0
    tokens = torch.where(first[:, None], padded_tokens(one.tokens, K), padded_tokens(other.tokens, K))
    drawn = None
    if one.drawn is not None or other.drawn is not None:
        drawn = torch.where(first[:, None], _drawn(one, K), _drawn(other, K))
    a, b = padded_distribution(one.q, K), padded_distribution(other.q, K)
    return replace(one, tokens=tokens, lengths=one.lengths + other.lengths, q=_either(first, a, b), drawn=drawn)


def _drawn(draft: Draft, K: int) -> Bool[Tensor, "B K"]:
    drawn = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.drawn is None else draft.drawn
    return torch.nn.functional.pad(drawn, (0, K - drawn.shape[1]))


def _either(first: Bool[Tensor, " B"], a: Distribution, b: Distribution) -> Distribution:
    """Return the distributions of `a` in the rows that are marked, and those of `b` in the others."""
    numbers = [
        torch.where(first[:, None], x, y)
        for x, y in ((a.scale, b.scale), (a.cutoff, b.cutoff), (a.lse, b.lse), (a.point, b.point))
    ]
    logits = torch.where(first[:, None, None], a.logits, b.logits)
    return Distribution(logits, numbers[0], numbers[1], numbers[2], numbers[3], a.vocab, a.plain and b.plain)
