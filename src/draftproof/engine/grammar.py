"""Grammars under speculation: at every scored position the tokens that may come there, whatever the draft says.

A grammar lives on the host and has to see the draft, so on a GPU a round waits once more: for the draft, before the
target's scores are judged.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from draftproof.core.device import AsyncCopy
from draftproof.core.types import ROOT, Draft
from draftproof.engine.request import Session


def masks(sessions: Sequence[Session], draft: Draft, V: int) -> Bool[Tensor, "B J V"] | None:
    """Which tokens are allowed at each position; None where no request has a grammar."""
    if all(s.request.allowed is None for s in sessions):
        return None
    B, K = draft.tokens.shape
    allowed = torch.ones((B, K + 1, V), dtype=torch.bool)
    tokens, lengths, parents = _on_host(draft)
    for b, session in enumerate(sessions):
        if session.request.allowed is not None:
            _fill(allowed[b], session, tokens[b][: lengths[b]], parents[b])
    return allowed.to(draft.tokens.device, non_blocking=True)


def _on_host(draft: Draft) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Its tokens, lengths and parents, had in one go."""
    B, K = draft.tokens.shape
    parts = [draft.tokens, draft.lengths[:, None], *([] if draft.parents is None else [draft.parents])]
    numbers = AsyncCopy(torch.cat(parts, 1)).read()
    chain = [list(range(ROOT, K - 1))] * B
    return numbers[:, :K].tolist(), numbers[:, K].tolist(), numbers[:, K + 1 :].tolist() if len(parts) > 2 else chain


def _fill(allowed: Bool[Tensor, "J V"], session: Session, tokens: list[int], parents: list[int]) -> None:
    """One row. Behind a draft token that is not allowed nothing is ever said, and the grammar is not asked."""
    ask = session.request.allowed
    assert ask is not None
    texts: list[list[int] | None] = [session.output]
    said = allowed.numpy()  # the same numbers, where looking costs least
    allowed[0] = _mask(ask(session.output), allowed.shape[-1])
    for slot, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        before = texts[parent + 1]
        reached = before is not None and bool(said[parent + 1, token])
        texts.append([*before, token] if before is not None and reached else None)
        if reached:
            allowed[slot + 1] = _mask(ask(texts[-1] or []), allowed.shape[-1])


def _mask(mask: Tensor, V: int) -> Tensor:
    if mask.shape != (V,) or mask.dtype != torch.bool:
        raise ValueError(f"allowed(prefix) must give a boolean mask of [{V}]; got {mask.dtype} {list(mask.shape)}")
    return mask
