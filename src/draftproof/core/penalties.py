"""Bias and penalties: edits to the logits of a few tokens, before anything else is done to them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.tree import ancestors
from draftproof.core.types import PAD, Draft, History

if TYPE_CHECKING:
    from draftproof.core.sampling import SamplingParams


def edited(
    logits: Float[Tensor, "B J R"],
    samplings: "Sequence[SamplingParams]",
    history: Sequence[History] | None,
    draft: Draft | None,
    vocab: DraftVocab | None = None,
) -> Float[Tensor, "B J R"]:
    """A copy of the logits with bias and penalties in it; the logits themselves where there is nothing to edit."""
    if not any(s.penalises or s.logit_bias for s in samplings):
        return logits
    penalised = [b for b, s in enumerate(samplings) if s.penalises]
    if penalised and history is None:
        raise ValueError(
            f"row {penalised[0]} asks for a penalty, which depends on what was seen: pass history, one "
            "(prompt_tokens, output_tokens) for each row"
        )
    if history is not None and len(history) != len(samplings):
        raise ValueError(f"history must have one entry a row: {len(samplings)} rows, {len(history)} entries")
    J, out = logits.shape[1], logits.clone()
    for b, sampling in enumerate(samplings):
        if sampling.penalises or sampling.logit_bias:
            seen = history[b] if history is not None and sampling.penalises else History([], [])
            _edit(out[b], sampling, History(*seen), *_drafted(draft, b, J, logits.device), vocab)
    return out


def _edit(
    logits: Float[Tensor, "J R"],
    sampling: "SamplingParams",
    history: History,
    drafted: Int[Tensor, " K"],
    before: Bool[Tensor, "J K"],
    vocab: DraftVocab | None,
) -> None:
    """Edit one row's logits in place. `before[j, i]`: drafted token i counts as seen at position j."""
    device = logits.device
    prompt, output = (_ids(part, device) for part in history)
    biased = _ids(sampling.logit_bias.keys(), device)
    tokens = torch.cat([prompt, output, drafted[drafted != PAD], biased]).unique()
    entries = tokens if vocab is None else vocab.entry[tokens]
    if not len(tokens):
        return
    if int(tokens[0]) < 0 or int(entries.max()) >= logits.shape[-1]:
        raise ValueError(
            f"history, draft and logit_bias name tokens from {int(tokens[0])} to {int(tokens[-1])}; "
            f"the vocabulary is [0, {logits.shape[-1]})"
        )
    amounts = torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=device)
    bias = torch.zeros(len(tokens), dtype=logits.dtype, device=device)
    bias[torch.searchsorted(tokens, biased)] = amounts
    in_draft = before.double() @ (drafted[:, None] == tokens).double()  # [J, E]
    in_output = _counts(tokens, output) + in_draft
    values = logits[:, entries.clamp_min(0)] + bias
    if sampling.repetition_penalty != 1:
        factor = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        seen = (in_output > 0) | (_counts(tokens, prompt) > 0)
        values = torch.where(seen, values * factor.to(values.dtype), values)
    spent = sampling.presence_penalty * (in_output > 0) + sampling.frequency_penalty * in_output
    present = entries >= 0
    logits[:, entries[present]] = (values - spent.to(values.dtype))[:, present]


def _counts(tokens: Int[Tensor, " E"], among: Int[Tensor, " N"]) -> Int[Tensor, " E"]:
    """How often each of `tokens` (sorted, and all there are) stands among these."""
    return torch.bincount(torch.searchsorted(tokens, among), minlength=len(tokens))


def _drafted(
    draft: Draft | None, b: int, J: int, device: torch.device
) -> tuple[Int[Tensor, " K"], Bool[Tensor, "J K"]]:
    """Row b's drafted tokens, and which of them come before each scored position."""
    if draft is None:
        return (
            torch.empty(0, dtype=torch.long, device=device),
            torch.empty((J, 0), dtype=torch.bool, device=device),
        )
    before = ancestors(draft)[b, :J]
    real = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[b]
    return draft.tokens[b].masked_fill(~real, PAD), before & real


def _ids(tokens: Tensor | Iterable[int], device: torch.device) -> Int[Tensor, " N"]:
    if isinstance(tokens, Tensor):
        return tokens.to(device=device, dtype=torch.long).flatten()
    return torch.tensor(list(tokens), dtype=torch.long, device=device)


def any_edits(samplings: "Sequence[SamplingParams]") -> bool:
    """Is there anything to be done to these rows' logits?"""
    return any(s.penalises or s.logit_bias for s in samplings)


def edited_without_sync(
    logits: Float[Tensor, "B *J R"],
    samplings: "Sequence[SamplingParams]",
    histories: Sequence[History],
    vocab: DraftVocab | None,
    draft: Draft | None = None,
) -> Float[Tensor, "B *J R"]:
    """A copy of the logits, float32, with bias and penalties in it: the same at every position of a row, or with the
    drafted tokens before each counted as seen."""
    out, before = logits.float().clone(), None if draft is None else _before(draft)
    for b, (row, sampling, history) in enumerate(zip(out, samplings, histories, strict=True)):
        if sampling.penalises or sampling.logit_bias:
            drafted = 0.0 if before is None else _tally(before[0][b], before[1][b], row.shape[-1], vocab)
            _edit_dense(row, sampling, history, drafted, vocab)
    return out


def _before(draft: Draft) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B J K"]]:
    """The drafted tokens, and 1 where one of them comes before a scored position."""
    real = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[:, None]
    return draft.tokens.clamp_min(0), (ancestors(draft) & real[:, None]).double()


def _edit_dense(
    row: Float[Tensor, "*J R"],
    sampling: "SamplingParams",
    history: History,
    drafted: Float[Tensor, "J R"] | float,
    vocab: DraftVocab | None,
) -> None:
    R, device = row.shape[-1], row.device
    biased, amounts = list(sampling.logit_bias.keys()), list(sampling.logit_bias.values())
    bias = _tally(to_device(biased, device), to_device(amounts, device, torch.float64), R, vocab)
    prompt, output = (_count(part, R, vocab, device) for part in history)
    output = output + drafted
    values = row + bias.to(row.dtype)
    if sampling.repetition_penalty != 1:
        factor = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        values = torch.where((output > 0) | (prompt > 0), values * factor.to(row.dtype), values)
    spent = sampling.presence_penalty * (output > 0) + sampling.frequency_penalty * output
    row.copy_(values - spent.to(row.dtype))


def _count(tokens: Tensor | list[int], R: int, vocab: DraftVocab | None, device: torch.device) -> Float[Tensor, " R"]:
    """How often each of the drafter's tokens stands among these."""
    there = tokens if isinstance(tokens, Tensor) else to_device(tokens, device)
    return _tally(there, torch.ones(len(there), dtype=torch.float64, device=device), R, vocab)


def _tally(
    tokens: Int[Tensor, " N"], amounts: Float[Tensor, "*J N"], R: int, vocab: DraftVocab | None
) -> Float[Tensor, "*J R"]:
    """The sum of the amounts at each of the drafter's tokens; what it does not have falls into a place behind them."""
    entries = tokens if vocab is None else vocab.entry[tokens]
    entries = torch.where((entries < 0) | (entries >= R), R, entries)
    nothing = torch.zeros((*amounts.shape[:-1], R + 1), dtype=torch.float64, device=tokens.device)
    return nothing.index_add_(-1, entries, amounts)[..., :R]
