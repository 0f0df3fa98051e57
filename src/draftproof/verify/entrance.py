"""The entrance for other people's engines: raw logits in, verdict out, and nothing assumed silently."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.law import Law, Vocab
from draftproof.core.noise import Noise
from draftproof.core.sampling import Sampling, warp
from draftproof.core.types import Draft, History, Verdict
from draftproof.verify import Verifier, resolve
from draftproof.verify.chain import real
from draftproof.verify.tree import check_parents

Samplings = Sampling | Sequence[Sampling]
Histories = Sequence[History | tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]]


def verify(
    target_logits: Float[Tensor, "B J V"],
    draft_tokens: Int[Tensor, "B K"],
    draft_logits: Float[Tensor, "B K R"] | None = None,
    *,
    draft_lengths: Int[Tensor, " B"] | None = None,
    sampling: Samplings | None = None,
    draft_sampling: Samplings | None = None,
    history: Histories | None = None,
    allowed: Bool[Tensor, "B J V"] | None = None,
    parents: Int[Tensor, "B K"] | None = None,
    rule: str | Verifier = "block",
    seeds: Int[Tensor, " B"] | int | None = None,
    positions: Int[Tensor, " B"] | int | None = None,
    draft_ids: Int[Tensor, " R"] | None = None,
) -> Verdict:
    """Decide which draft tokens are kept and what follows them, with exactly the target's distribution.

    target_logits   the target's raw scores: position 0 before the draft, position i + 1 behind draft token i
    draft_tokens    what the drafter proposed
    draft_logits    the raw scores the drafter drew from; None: it chose its tokens without drawing (n-gram, argmax)
    draft_lengths   how many tokens of each row count, 0 to K; all if None
    sampling        how the target's tokens are to be drawn; one for all rows or one for each; None: plain softmax
    draft_sampling  how the draft's tokens *were* drawn; needed with draft_logits unless `sampling` is plain softmax
    history         (prompt tokens, output tokens) of each row; needed by the penalties
    allowed         which tokens may come at each scored position; None: all
    parents         the parent slot of each draft token, -1 for the root, if the draft is a tree (rule="tree")
    rule            "block" (keeps most), "token", "coupled" (the text depends on the seed alone), "tree", or a Verifier
    seeds           one for each row; None: drawn from torch's default generator
    positions       index of the first token this call emits in each row, prompt counted; needed with seeds, as
                    otherwise every round would throw the same coins again
    draft_ids       the target's id of each entry of a smaller draft vocabulary; `torch.arange(R)` where the target's
                    is merely padded

    Returns a Verdict: `tokens` [B, K + 1] (kept ones, one closing token, then -1) and `accepted` [B].

    >>> import torch, draftproof as dp
    >>> torch.manual_seed(0)                                      # doctest: +SKIP
    >>> B, K, V = 2, 4, 32000
    >>> warm = dp.Sampling(temperature=0.8, top_p=0.95)
    >>> draft_logits = torch.randn(B, K, V)                       # your drafter's scores, and its own draws:
    >>> draft_tokens = dp.warp(draft_logits, [warm] * B).probs().flatten(0, 1).multinomial(1).view(B, K)
    >>> target_logits = torch.randn(B, K + 1, V)                  # your target's scores, in one pass
    >>> verdict = dp.verify(
    ...     target_logits, draft_tokens, draft_logits, sampling=warm, draft_sampling=warm
    ... )
    >>> for row, kept in zip(verdict.tokens, verdict.accepted):
    ...     new_tokens = row[: kept + 1]                          # append these, and go on
    """
    B, K, V = _check_shapes(target_logits, draft_tokens, draft_logits, draft_ids)
    samplings = _samplings("sampling", sampling, B)
    if draft_logits is not None and draft_sampling is None and not all(s.neutral for s in samplings):
        raise ValueError(
            "draft_sampling must say how the draft's tokens were drawn: sampling is not plain softmax, and the "
            "law of a drawn token cannot be guessed. Pass draft_sampling=sampling if both use the same"
        )
    lengths = _lengths(draft_lengths, draft_tokens)
    chosen = Draft(draft_tokens, lengths, parents=parents)
    _check_tokens(chosen, V)
    _check_same_shape("allowed", allowed, (B, K + 1, V))
    _check_same_shape("parents", parents, (B, K))
    check_parents(chosen)
    seen = None if history is None else [History(*row) for row in history]  # type: ignore[arg-type]
    p = warp(target_logits, samplings, seen, chosen, allowed)
    _check_law("target_logits", p, allowed, torch.ones_like(p.lse, dtype=torch.bool))
    draft = chosen
    if draft_logits is not None:
        vocab = None if draft_ids is None else Vocab.of(draft_ids, V)
        q = warp(draft_logits, _samplings("draft_sampling", draft_sampling, B), seen, chosen, vocab=vocab)
        _check_law("draft_logits", q, None, real(chosen))
        draft = Draft(draft_tokens, lengths, q, parents=parents)
        _check_drawn(draft, q)
    return resolve(rule)(p, draft, _noise(seeds, positions, samplings, target_logits.device))


def _check_shapes(
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


def _check_same_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(tensor.shape)}")


def _samplings(name: str, given: Samplings | None, B: int) -> list[Sampling]:
    if given is None or isinstance(given, Sampling):
        return [given or Sampling()] * B
    if len(given) != B:
        raise ValueError(f"{name} must be one Sampling, or one for each of {B} rows; got {len(given)}")
    return list(given)


def _lengths(given: Tensor | None, draft_tokens: Tensor) -> Int[Tensor, " B"]:
    B, K = draft_tokens.shape
    if given is None:
        return torch.full((B,), K, dtype=torch.long, device=draft_tokens.device)
    _check_same_shape("draft_lengths", given, (B,))
    if bool(((given < 0) | (given > K)).any()):
        raise ValueError(f"draft_lengths must lie in [0, {K}]; got {given.tolist()}")
    return given.long()


def _check_tokens(draft: Draft, V: int) -> None:
    wrong = ((draft.tokens < 0) | (draft.tokens >= V)) & real(draft)
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"draft_tokens[{b}, {i}] is {int(draft.tokens[b, i])}; the vocabulary is [0, {V})")


def _check_law(name: str, law: Law, allowed: Tensor | None, where: Bool[Tensor, "B J"]) -> None:
    wrong = law.lse.isnan() & where
    if bool(wrong.any()):
        b, j = wrong.nonzero()[0].tolist()
        row = law.logits[b, j]
        if bool(row.isnan().any()):
            what = "has NaN in it"
        elif bool((row == torch.inf).any()):
            what = "has +inf in it"
        elif allowed is not None and not bool(allowed[b, j].any()):
            what = "has no allowed token: allowed is False everywhere"
        else:
            what = "leaves no token possible: all its logits are -inf once bias and mask are applied"
        raise ValueError(f"{name}[{b}, {j}] {what}")


def _check_drawn(draft: Draft, q: Law) -> None:
    impossible = torch.isneginf(q.log_prob(draft.tokens)) & real(draft)
    if bool(impossible.any()):
        b, i = impossible.nonzero()[0].tolist()
        raise ValueError(
            f"draft_tokens[{b}, {i}] = {int(draft.tokens[b, i])} has probability 0 under draft_logits with "
            "draft_sampling: it was not drawn from that law. Pass the law it was drawn from, or no draft_logits if "
            "it was chosen"
        )


def _noise(
    seeds: Tensor | int | None,
    positions: Tensor | int | None,
    samplings: Sequence[Sampling],
    device: torch.device,
) -> Noise:
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
    return Noise(_column("seeds", seeds, B, device), _column("positions", positions, B, device))


def _column(name: str, value: Tensor | int, B: int, device: torch.device) -> Int[Tensor, " B"]:
    if isinstance(value, int):
        if name == "seeds" and B > 1:
            raise ValueError(f"seeds must be one for each of {B} rows: rows that share a seed share their coins")
        return torch.full((B,), value, dtype=torch.long, device=device)
    _check_same_shape(name, value, (B,))
    return value.to(device=device, dtype=torch.long)
