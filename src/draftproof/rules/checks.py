"""Check the arguments of `verify` and the drafts of an engine: shapes, token ids, and whether q can be the source.

A message gives the name, the value, the shape and what to do instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.tree import check_parents, misplaced, real
from draftproof.core.types import PAD, Draft

Samplings = SamplingParams | Sequence[SamplingParams]


def check_shapes(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_ids: Tensor | None
) -> tuple[int, int, int]:
    """Return B, K and V, or refuse tensors whose shapes do not fit together."""
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
    """Refuse an optional tensor of another shape."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(tensor.shape)}")


def samplings_of(name: str, given: Samplings | None, B: int) -> list[SamplingParams]:
    """Return one `SamplingParams` for each row."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * B
    if len(given) != B:
        raise ValueError(f"{name} must be one SamplingParams, or one for each of {B} rows; got {len(given)}")
    return list(given)


def lengths_of(given: Tensor | None, draft_tokens: Tensor) -> Int[Tensor, " B"]:
    """Return how many draft tokens of each row count: all where nothing was given."""
    B, K = draft_tokens.shape
    if given is None:
        return torch.full((B,), K, dtype=torch.long, device=draft_tokens.device)
    check_same_shape("draft_lengths", given, (B,))
    return given.to(draft_tokens.device, torch.long, non_blocking=True)


BAD_TARGET: Final = 1
BAD_DRAFT: Final = 2
BAD_TOKEN: Final = 4
MIXED_DRAFT: Final = 8
BAD_PARENT: Final = 16
BAD_LENGTH: Final = 32
"""Fault bits of a row; the first three are the kernels' own (`kernels.Rows`). In order: scores of a scored position are
not a distribution; q is not one, or gives a drawn token probability 0; a draft token is outside the vocabulary; the
draft was not all drawn in one way, which the kernels leave to the reference; a slot's parent is not an earlier slot; a
length is not in [0, K]."""

ROUNDING: Final = 1e-4
"""By how much log q(x) may exceed 0: q is a float32 softmax."""


def screened(draft: Draft, V: int) -> tuple[Draft, Int[Tensor, " B"]]:
    """Empty the rows whose draft cannot be verified and say why, as fault bits. Nothing is synchronised."""
    K = draft.tokens.shape[1]
    if K == 0:
        return draft, torch.zeros_like(draft.lengths)
    lengths = draft.lengths.clamp(0, K)
    there = torch.arange(K, device=lengths.device) < lengths[:, None]
    outside = there & ((draft.tokens < 0) | (draft.tokens >= V))
    faults = BAD_TOKEN * outside.any(1) | BAD_LENGTH * (lengths != draft.lengths)
    tokens = draft.tokens.clamp(PAD, V - 1)
    sized = replace(draft, tokens=tokens, lengths=lengths)
    if draft.parents is not None:
        faults = faults | BAD_PARENT * misplaced(sized).any(1)
    if draft.q is not None:
        faults = faults | BAD_DRAFT * _impossible(sized, draft.q, there).any(1)
    return _without(draft, sized, faults), faults


def screened_q(draft: Draft) -> tuple[Draft, Int[Tensor, " B"]]:
    """Empty the rows whose q cannot be what their tokens were drawn from, and say which, as fault bits."""
    if draft.q is None or draft.tokens.shape[1] == 0:
        return draft, torch.zeros_like(draft.lengths)
    faults = BAD_DRAFT * _impossible(draft, draft.q, real(draft)).any(1)
    return _without(draft, draft, faults), faults


def _without(draft: Draft, sized: Draft, faults: Int[Tensor, " B"]) -> Draft:
    """Return the draft with its faulty rows emptied; the draft itself where the CPU sees that there are none."""
    if is_cpu(faults.device) and not bool(faults.any()):
        return draft
    return replace(sized, lengths=sized.lengths.masked_fill(faults != 0, 0))


def _impossible(draft: Draft, q: Distribution, there: Bool[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
    """Mark drawn tokens whose declared probability is not in (0, 1]: NaN, 0, or more than 1. `there`: real slots."""
    drawn = there if draft.drawn is None else there & draft.drawn
    log_q = q.log_prob(draft.tokens)
    return drawn & ~((log_q > -torch.inf) & (log_q <= ROUNDING))  # NaN fails both comparisons


def explain_faults(
    draft: Draft,
    allowed: Bool[Tensor, "B J V"] | None,
    with_q: Draft,
    faults: Int[Tensor, " B"],
    p: Distribution,
) -> None:
    """Raise for the first fault of a call of `verify`, in the words of its arguments; return where there is none."""
    if not bool(faults.any()):
        return
    (B, K), V = draft.tokens.shape, p.vocab_size
    if bool(((draft.lengths < 0) | (draft.lengths > K)).any()):
        raise ValueError(f"draft_lengths must lie in [0, {K}]; got {draft.lengths.tolist()}")
    outside = ((draft.tokens < 0) | (draft.tokens >= V)) & real(draft)
    if bool(outside.any()):
        b, i = outside.nonzero()[0].tolist()
        raise ValueError(f"draft_tokens[{b}, {i}] is {int(draft.tokens[b, i])}; the vocabulary is [0, {V})")
    check_parents(draft)
    broken = faults.bitwise_and(BAD_TARGET) != 0
    _explain_rows("target_logits", p, allowed, broken[:, None].expand(B, K + 1))
    if with_q.q is not None:
        _explain_rows("draft_logits", with_q.q, None, real(draft))
        _explain_drawn(draft, with_q.q)
    row = int(faults.nonzero()[0])
    raise ValueError(f"row {row} of target_logits is not a distribution at every scored position")


def _explain_rows(name: str, dist: Distribution, allowed: Tensor | None, where: Bool[Tensor, "B J"]) -> None:
    """Raise where a row of logits is not a distribution, and say what is in it."""
    for b, j in where.nonzero().tolist():
        row = dist.logits[b, j]
        if bool(row.isnan().any()):
            what = "has NaN in it"
        elif bool((row == torch.inf).any()):
            what = "has +inf in it"
        elif allowed is not None and not bool(allowed[b, j].any()):
            what = "has no allowed token: allowed is False everywhere"
        elif not bool(torch.isfinite(row).any()):
            what = "leaves no token possible: all its logits are -inf once bias and mask are applied"
        else:
            continue
        raise ValueError(f"{name}[{b}, {j}] {what}")


def describe_draft_fault(draft: Draft, b: int, faults: int, V: int) -> str:
    """Say what is wrong with one row of a drafter's draft; it synchronises."""
    K, length, tokens = draft.tokens.shape[1], int(draft.lengths[b]), draft.tokens[b].tolist()
    if faults & BAD_LENGTH:
        return f"a draft of length {length}, where its tokens are [B, {K}]"
    if faults & BAD_TOKEN:
        wrong = next(token for token in tokens[:length] if not 0 <= token < V)
        return f"token {wrong}, where the vocabulary is [0, {V})"
    if faults & BAD_PARENT:
        assert draft.parents is not None
        return f"parents {draft.parents[b, :length].tolist()}: a slot's parent is -1 (the root) or an earlier slot"
    assert draft.q is not None
    i = int(_impossible(draft, draft.q, real(draft))[b].nonzero()[0])
    chance = float(draft.q.log_prob(draft.tokens)[b, i].exp())
    return (
        f"token {tokens[i]} at draft position {i} with a declared probability of {chance:g}: it cannot have been drawn "
        "from that distribution"
    )


def _explain_drawn(draft: Draft, q: Distribution) -> None:
    wrong = _impossible(draft, q, real(draft))
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"draft_tokens[{b}, {i}] = {int(draft.tokens[b, i])} has probability 0 under draft_logits with "
            "draft_sampling: it was not drawn from that distribution. Pass the scores and sampling it was drawn from, "
            "or no draft_logits if it was chosen"
        )


def rng_of(
    seeds: Tensor | int | None,
    positions: Tensor | int | None,
    samplings: Sequence[SamplingParams],
    device: torch.device,
) -> Philox:
    """Make the random numbers of one call, from given seeds or from torch's default generator."""
    B = len(samplings)
    seeded = seeds is not None or any(s.seed is not None for s in samplings)
    if positions is None and seeded:
        raise ValueError(
            "positions must be given with seeds: the index of the first token this call emits in each row, prompt "
            "counted. Without it every round would use the same random numbers again"
        )
    if seeds is None:
        fresh = torch.randint(2**62, (B,)).tolist()
        seeds = torch.tensor([f if s.seed is None else s.seed for s, f in zip(samplings, fresh, strict=True)])
    positions = 0 if positions is None else positions
    return Philox(_column("seeds", seeds, B, device), _column("positions", positions, B, device))


def _column(name: str, value: Tensor | int, B: int, device: torch.device) -> Int[Tensor, " B"]:
    if isinstance(value, int):
        if name == "seeds" and B > 1:
            raise ValueError(
                f"seeds must be one for each of {B} rows: rows that share a seed share their random numbers"
            )
        return torch.full((B,), value, dtype=torch.long, device=device)
    check_same_shape(name, value, (B,))
    return value.to(device=device, dtype=torch.long, non_blocking=True)
