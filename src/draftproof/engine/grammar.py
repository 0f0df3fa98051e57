"""Make the masks of constrained decoding: the tokens that a grammar allows at every scored position of a draft.

A grammar runs on the CPU and must see the draft. So on a GPU such a round synchronises once more, to read the draft
before verification.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from draftproof.core.device import AsyncCopy
from draftproof.core.types import ROOT, Draft
from draftproof.engine.request import Allowed, Session


def masks(sessions: Sequence[Session], draft: Draft, V: int) -> tuple[Bool[Tensor, "B J V"], dict[int, str]]:
    """Return which tokens are allowed at each position, and by row why a grammar failed: its request fails alone."""
    B, K = draft.tokens.shape
    allowed, faults = torch.ones((B, K + 1, V), dtype=torch.bool), {}
    tokens, lengths, parents = _on_cpu(draft)
    for b, session in enumerate(sessions):
        if session.request.allowed is not None:
            try:
                _fill(allowed[b], session, tokens[b][: lengths[b]], parents[b])
            except Exception as error:  # a caller's function: whatever it raises concerns its request only
                allowed[b] = True
                faults[b] = f"its grammar failed: {type(error).__name__}: {error}"
    return allowed.to(draft.tokens.device, non_blocking=True), faults


def end_later(allowed: Allowed | None, ends: Collection[int], min_tokens: int, V: int) -> Allowed:
    """Return a grammar that also forbids the tokens in `ends` until there are `min_tokens` output tokens."""
    everything = torch.ones(V, dtype=torch.bool)
    without = everything.index_fill(0, torch.tensor(sorted(ends), dtype=torch.long), False)

    def later(output: Sequence[int]) -> Bool[Tensor, " V"]:
        mask = everything if allowed is None else allowed(output)
        return mask & without if len(output) < min_tokens else mask

    return later


def _on_cpu(draft: Draft) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Copy a draft's tokens, lengths and parents to the CPU, in one synchronisation."""
    B, K = draft.tokens.shape
    parts = [draft.tokens, draft.lengths[:, None], *([] if draft.parents is None else [draft.parents])]
    numbers = AsyncCopy(torch.cat(parts, 1)).read()
    chain = [list(range(ROOT, K - 1))] * B
    return numbers[:, :K].tolist(), numbers[:, K].tolist(), numbers[:, K + 1 :].tolist() if len(parts) > 2 else chain


def _fill(allowed: Bool[Tensor, "J V"], session: Session, tokens: list[int], parents: list[int]) -> None:
    """Fill one row's masks. After a draft token that is not allowed the grammar is not called: it is never accepted."""
    allowed_after = session.request.allowed
    assert allowed_after is not None
    texts: list[list[int] | None] = [session.output]
    flags = allowed.numpy()  # shares memory; reading one entry is faster in numpy
    allowed[0] = _checked(allowed_after(session.output), allowed.shape[-1])
    for slot, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        before = texts[parent + 1]
        reached = before is not None and 0 <= token < flags.shape[1] and bool(flags[parent + 1, token])
        texts.append([*before, token] if before is not None and reached else None)
        if reached:
            allowed[slot + 1] = _checked(allowed_after(texts[-1] or []), allowed.shape[-1])


def _checked(mask: Any, V: int) -> Tensor:
    """Refuse a grammar's answer that is not a mask of the vocabulary."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"allowed(prefix) must return a boolean tensor of [{V}]; got {type(mask).__name__}")
    if mask.shape != (V,) or mask.dtype != torch.bool:
        raise ValueError(f"allowed(prefix) must return a boolean mask of [{V}]; got {mask.dtype} {list(mask.shape)}")
    return mask
