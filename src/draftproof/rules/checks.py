"""What `verify` asks of its arguments, and in which words it refuses them: name, value, shape, what to do instead."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.tree import real
from draftproof.core.types import Draft

Samplings = SamplingParams | Sequence[SamplingParams]


def check_shapes(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_ids: Tensor | None
) -> tuple[int, int, int]:
    if target_logits.ndim != 3 or draft_tokens.ndim != 2:
        raise ValueError(
            "target_logits must be [B, K + 1, V] and draft_tokens [B, K]; got "
            f"{list(target_logits.shape)} and {list(draft_tokens.shape)}"
        )
    (B, J, V), K = target_logits.shape, draft_tokens.shape[1]
    if len(draft_tokens) != B or K + 1 != J:
        raise ValueError(
            f"target_logits {list(target_logits.shape)} score {J} positions of {B} rows; draft_tokens "
            f"{list(draft_tokens.shape)} need {K + 1} positions (one more than tokens) of {len(draft_tokens)} rows"
        )
    if draft_logits is not None:
        R = V if draft_ids is None else len(draft_ids)
        if draft_logits.shape[:2] != (B, K) or (draft_ids is not None and draft_logits.shape[-1] != R):
            raise ValueError(f"draft_logits must be [{B}, {K}, {R}]; got {list(draft_logits.shape)}")
        if draft_logits.shape[-1] != R:
            raise ValueError(
                f"draft_logits are over {draft_logits.shape[-1]} tokens, target_logits over {V}. Where the draft "
                "vocabulary is part of the target's, say which: draft_ids=torch.arange(R) if it is its beginning"
            )
    return B, K, V


def check_same_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(tensor.shape)}")


def samplings_of(name: str, given: Samplings | None, B: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * B
    if len(given) != B:
        raise ValueError(f"{name} must be one SamplingParams, or one for each of {B} rows; got {len(given)}")
    return list(given)


def lengths_of(given: Tensor | None, draft_tokens: Tensor) -> Int[Tensor, " B"]:
    B, K = draft_tokens.shape
    if given is None:
        return torch.full((B,), K, dtype=torch.long, device=draft_tokens.device)
    check_same_shape("draft_lengths", given, (B,))
    return given.to(draft_tokens.device, torch.long, non_blocking=True)


def check_lengths(lengths: Tensor, K: int) -> None:
    if bool(((lengths < 0) | (lengths > K)).any()):
        raise ValueError(f"draft_lengths must lie in [0, {K}]; got {lengths.tolist()}")


def check_tokens(draft: Draft, V: int) -> None:
    wrong = ((draft.tokens < 0) | (draft.tokens >= V)) & real(draft)
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"draft_tokens[{b}, {i}] is {int(draft.tokens[b, i])}; the vocabulary is [0, {V})")


def check_distribution(name: str, dist: Distribution, allowed: Tensor | None, where: Bool[Tensor, "B J"]) -> None:
    wrong = dist.lse.isnan() & where
    if bool(wrong.any()):
        b, j = wrong.nonzero()[0].tolist()
        row = dist.logits[b, j]
        if bool(row.isnan().any()):
            what = "has NaN in it"
        elif bool((row == torch.inf).any()):
            what = "has +inf in it"
        elif allowed is not None and not bool(allowed[b, j].any()):
            what = "has no allowed token: allowed is False everywhere"
        else:
            what = "leaves no token possible: all its logits are -inf once bias and mask are applied"
        raise ValueError(f"{name}[{b}, {j}] {what}")


def check_drawn(draft: Draft, q: Distribution) -> None:
    impossible = torch.isneginf(q.log_prob(draft.tokens)) & real(draft)
    if bool(impossible.any()):
        b, i = impossible.nonzero()[0].tolist()
        raise ValueError(
            f"draft_tokens[{b}, {i}] = {int(draft.tokens[b, i])} has probability 0 under draft_logits with "
            "draft_sampling: it was not drawn from that distribution. Pass the distribution it was drawn from, or no draft_logits if "
            "it was chosen"
        )


def rng_of(
    seeds: Tensor | int | None,
    positions: Tensor | int | None,
    samplings: Sequence[SamplingParams],
    device: torch.device,
) -> Philox:
    B = len(samplings)
    seeded = seeds is not None or any(s.seed is not None for s in samplings)
    if positions is None and seeded:
        raise ValueError(
            "positions must be given with seeds: the index of the first token this call emits in each row, prompt "
            "counted. Without it every round would throw the same coins again"
        )
    if seeds is None:
        fresh = torch.randint(2**62, (B,)).tolist()
        seeds = torch.tensor([f if s.seed is None else s.seed for s, f in zip(samplings, fresh, strict=True)])
    positions = 0 if positions is None else positions
    return Philox(_column("seeds", seeds, B, device), _column("positions", positions, B, device))


def _column(name: str, value: Tensor | int, B: int, device: torch.device) -> Int[Tensor, " B"]:
    if isinstance(value, int):
        if name == "seeds" and B > 1:
            raise ValueError(f"seeds must be one for each of {B} rows: rows that share a seed share their coins")
        return torch.full((B,), value, dtype=torch.long, device=device)
    check_same_shape(name, value, (B,))
    return value.to(device=device, dtype=torch.long, non_blocking=True)
