"""Bias and penalties where looking is waiting: dense counts over the vocabulary, no short lists.

Twin: `core.edits.edited`, which lists the tokens it touches and so has to look at them. A draft declares whatever law
comes out; a target's law behind a draft (log-probabilities, trees) has to be the twin's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core import host
from draftproof.core.edits import ancestors
from draftproof.core.host import sent
from draftproof.core.law import Law, Vocab
from draftproof.core.sampling import NO_BIAS, Sampling, warp
from draftproof.core.types import Draft, History


def edits(samplings: Sequence[Sampling]) -> bool:
    """Is there anything to be done to these rows' logits?"""
    return any(s.penalises or s.logit_bias for s in samplings)


def law_of(
    logits: Float[Tensor, "B J R"],
    samplings: Sequence[Sampling],
    histories: Sequence[History] | None,
    vocab: Vocab | None = None,
    draft: Draft | None = None,
    allowed: Bool[Tensor, "B J R"] | None = None,
) -> Law:
    """`warp`, without a look at what lies elsewhere."""
    if host.is_host(logits.device) or not edits(samplings):
        return warp(logits, samplings, histories, draft, allowed, vocab)
    histories = [History([], [])] * len(samplings) if histories is None else histories
    return warp(edited(logits, samplings, histories, vocab, draft), unedited(samplings), allowed=allowed, vocab=vocab)


def unedited(samplings: Sequence[Sampling]) -> list[Sampling]:
    """What is left to be done: penalties and bias must not come twice."""
    return [
        replace(s, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=NO_BIAS)
        for s in samplings
    ]


def edited(
    logits: Float[Tensor, "B *J R"],
    samplings: Sequence[Sampling],
    histories: Sequence[History],
    vocab: Vocab | None,
    draft: Draft | None = None,
) -> Float[Tensor, "B *J R"]:
    """A copy of the logits, float32, with bias and penalties in it: the same at every position of a row, or with the
    drafted tokens before each counted as seen."""
    out, before = logits.float().clone(), None if draft is None else _before(draft)
    for b, (row, sampling, history) in enumerate(zip(out, samplings, histories, strict=True)):
        if sampling.penalises or sampling.logit_bias:
            drafted = 0.0 if before is None else _tally(before[0][b], before[1][b], row.shape[-1], vocab)
            _edit(row, sampling, history, drafted, vocab)
    return out


def _before(draft: Draft) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B J K"]]:
    """The drafted tokens, and 1 where one of them comes before a scored position."""
    real = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[:, None]
    return draft.tokens.clamp_min(0), (ancestors(draft) & real[:, None]).double()


def _edit(
    row: Float[Tensor, "*J R"],
    sampling: Sampling,
    history: History,
    drafted: Float[Tensor, "J R"] | float,
    vocab: Vocab | None,
) -> None:
    R, device = row.shape[-1], row.device
    biased, amounts = list(sampling.logit_bias.keys()), list(sampling.logit_bias.values())
    bias = _tally(sent(biased, device), sent(amounts, device, torch.float64), R, vocab)
    prompt, output = (_count(part, R, vocab, device) for part in history)
    output = output + drafted
    values = row + bias.to(row.dtype)
    if sampling.repetition_penalty != 1:
        factor = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        values = torch.where((output > 0) | (prompt > 0), values * factor.to(row.dtype), values)
    spent = sampling.presence_penalty * (output > 0) + sampling.frequency_penalty * output
    row.copy_(values - spent.to(row.dtype))


def _count(tokens: Tensor | list[int], R: int, vocab: Vocab | None, device: torch.device) -> Float[Tensor, " R"]:
    """How often each of the drafter's tokens stands among these."""
    there = tokens if isinstance(tokens, Tensor) else sent(tokens, device)
    return _tally(there, torch.ones(len(there), dtype=torch.float64, device=device), R, vocab)


def _tally(
    tokens: Int[Tensor, " N"], amounts: Float[Tensor, "*J N"], R: int, vocab: Vocab | None
) -> Float[Tensor, "*J R"]:
    """The sum of the amounts at each of the drafter's tokens; what it does not have falls into a place behind them."""
    entries = tokens if vocab is None else vocab.entry[tokens]
    entries = torch.where((entries < 0) | (entries >= R), R, entries)
    nothing = torch.zeros((*amounts.shape[:-1], R + 1), dtype=torch.float64, device=tokens.device)
    return nothing.index_add_(-1, entries, amounts)[..., :R]
