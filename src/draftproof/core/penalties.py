"""Bias and penalties: edits to the logits of a few tokens, before anything else is done to them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.law import Vocab
from draftproof.core.lineage import lineage
from draftproof.core.types import PAD, Draft, History

if TYPE_CHECKING:
    from draftproof.core.sampling import Sampling


def edited(
    logits: Float[Tensor, "B J R"],
    samplings: "Sequence[Sampling]",
    history: Sequence[History] | None,
    draft: Draft | None,
    vocab: Vocab | None = None,
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
    sampling: "Sampling",
    history: History,
    drafted: Int[Tensor, " K"],
    before: Bool[Tensor, "J K"],
    vocab: Vocab | None,
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


def ancestors(draft: Draft) -> Bool[Tensor, "B J K"]:
    """Which slots come before each scored position: none at 0; at i + 1 slot i and all it descends from."""
    B, K = draft.tokens.shape
    if draft.parents is None:
        lower = torch.ones((K + 1, K), dtype=torch.bool, device=draft.tokens.device).tril(-1)
        return lower.expand(B, K + 1, K)
    return lineage(draft.parents)[..., 1:]


def _ids(tokens: Tensor | Iterable[int], device: torch.device) -> Int[Tensor, " N"]:
    if isinstance(tokens, Tensor):
        return tokens.to(device=device, dtype=torch.long).flatten()
    return torch.tensor(list(tokens), dtype=torch.long, device=device)
