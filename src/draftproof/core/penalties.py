"""Apply logit bias and repetition, presence and frequency penalties to logits, before all filters.

There are two implementations of the same edits. `edited` is the reference: it lists the affected tokens of each row and
reads their values, which on a GPU is a sync. `edited_without_sync` uses dense counts over the vocabulary instead of
index lists, and never reads a value on the CPU.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.tree import ancestors, real
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
    """Return a copy of the logits with bias and penalties applied.

    At each position the draft tokens before it count as seen.
    """
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
            _edit(out[b], sampling, History(*seen), *_draft_of_row(draft, b, J, logits.device), vocab)
    return out


def edited_without_sync(
    logits: Float[Tensor, "B *J R"],
    samplings: "Sequence[SamplingParams]",
    histories: Sequence[History],
    vocab: DraftVocab | None,
    draft: Draft | None = None,
) -> Float[Tensor, "B *J R"]:
    """Return a float32 copy of the logits with bias and penalties applied, without a sync. Reference: `edited`.

    Without a draft all positions of a row are edited alike.
    """
    out, before = logits.float().clone(), None if draft is None else _draft_before(draft)
    for b, (row, sampling, history) in enumerate(zip(out, samplings, histories, strict=True)):
        if sampling.penalises or sampling.logit_bias:
            drafted = 0.0 if before is None else _dense_sums(before[0][b], before[1][b], row.shape[-1], vocab)
            _edit_dense(row, sampling, history, drafted, vocab)
    return out


# -------------------------------------------------------------------------------------- edits by lists of tokens


def _edit(
    logits: Float[Tensor, "J R"],
    sampling: "SamplingParams",
    history: History,
    drafted: Int[Tensor, " K"],
    before: Bool[Tensor, "J K"],
    vocab: DraftVocab | None,
) -> None:
    """Edit one row's logits in place. `before[j, i]`: draft token i counts as seen at position j."""
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
    """Count each of `tokens` in `among`; `tokens` is sorted and contains all of `among`."""
    return torch.bincount(torch.searchsorted(tokens, among), minlength=len(tokens))


def _draft_of_row(
    draft: Draft | None, b: int, J: int, device: torch.device
) -> tuple[Int[Tensor, " K"], Bool[Tensor, "J K"]]:
    """Return row b's draft tokens, and which of them come before each scored position."""
    if draft is None:
        return (
            torch.empty(0, dtype=torch.long, device=device),
            torch.empty((J, 0), dtype=torch.bool, device=device),
        )
    before, holds_token = ancestors(draft)[b, :J], real(draft)[b]
    return draft.tokens[b].masked_fill(~holds_token, PAD), before & holds_token


def _ids(tokens: Tensor | Iterable[int], device: torch.device) -> Int[Tensor, " N"]:
    if isinstance(tokens, Tensor):
        return tokens.to(device=device, dtype=torch.long).flatten()
    return torch.tensor(list(tokens), dtype=torch.long, device=device)


# ------------------------------------------------------------------------------------------ edits by dense counts


def _edit_dense(
    row: Float[Tensor, "*J R"],
    sampling: "SamplingParams",
    history: History,
    drafted: Float[Tensor, "J R"] | float,
    vocab: DraftVocab | None,
) -> None:
    """Edit one row's logits in place; `drafted` counts each token in the draft before each position."""
    R, device = row.shape[-1], row.device
    biased, amounts = list(sampling.logit_bias.keys()), list(sampling.logit_bias.values())
    bias = _dense_sums(to_device(biased, device), to_device(amounts, device, torch.float64), R, vocab)
    prompt, output = (_dense_counts(part, R, vocab, device) for part in history)
    output = output + drafted
    values = row + bias.to(row.dtype)
    if sampling.repetition_penalty != 1:
        factor = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        values = torch.where((output > 0) | (prompt > 0), values * factor.to(row.dtype), values)
    spent = sampling.presence_penalty * (output > 0) + sampling.frequency_penalty * output
    row.copy_(values - spent.to(row.dtype))


def _draft_before(draft: Draft) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B J K"]]:
    """Return the draft tokens, and 1 where a token comes before a scored position, else 0."""
    return draft.tokens.clamp_min(0), (ancestors(draft) & real(draft)[:, None]).double()


def _dense_counts(
    tokens: Tensor | list[int], R: int, vocab: DraftVocab | None, device: torch.device
) -> Float[Tensor, " R"]:
    """Count each entry of the vocabulary among these tokens."""
    ids = tokens if isinstance(tokens, Tensor) else to_device(tokens, device)
    return _dense_sums(ids, torch.ones(len(ids), dtype=torch.float64, device=device), R, vocab)


def _dense_sums(
    tokens: Int[Tensor, " N"], amounts: Float[Tensor, "*J N"], R: int, vocab: DraftVocab | None
) -> Float[Tensor, "*J R"]:
    """Sum the amounts at each entry of the vocabulary; tokens outside it go to a spare entry that is cut off."""
    entries = tokens if vocab is None else vocab.entry[tokens]
    entries = torch.where((entries < 0) | (entries >= R), R, entries)
    zeros = torch.zeros((*amounts.shape[:-1], R + 1), dtype=torch.float64, device=tokens.device)
    return zeros.index_add_(-1, entries, amounts)[..., :R]
