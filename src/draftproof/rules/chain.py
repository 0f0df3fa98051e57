"""Shared parts of the chain rules: q of a draft, residuals max(0, p − q), stop tables and verdicts.

A place is a row and a position in it: `rows[n]`, `at[n]`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution
from draftproof.core.draw import row_by_row
from draftproof.core.types import PAD, Draft, InexactError, Verdict


@dataclass(frozen=True, slots=True)
class StopTable:
    """All stopping points of a row, in the order in which they are tried.

    At stopping point s the row stops with probability `chance[:, s]`, given that no earlier one stopped it. It then
    keeps the draft up to node `node[:, s]`, and the round's last token is drawn from the distribution `closing[:, s]`.
    Node 0 is the root, before any draft token; node i + 1 comes after slot i, so for a chain the node is the number of
    kept tokens.
    """

    node: Int[Tensor, "B S"]
    chance: Float[Tensor, "B S"]
    closing: Float[Tensor, "B S V"]


def refuse_inexact(draft: Draft, rule: str) -> None:
    """Refuse drafts that a chain rule would bias: trees, and drafts drawn with the target's own random numbers."""
    if draft.parents is not None:
        raise InexactError(f'rule="{rule}" verifies chains, and this draft is a tree (it has parents): use rule="tree"')
    if draft.shared_rng:
        raise InexactError(
            f'this draft was drawn with the target\'s own random numbers; under rule="{rule}" that is a bias. '
            'Use rule="coupled", or draw the draft with the random numbers of Purpose.DRAFT'
        )


def log_ratios(p: Distribution, draft: Draft) -> Float[Tensor, "B K"]:
    """Return log p(x) − log q(x) of every draft token x; q is 1 where x was chosen."""
    log_p = p.head(draft.tokens.shape[1]).log_prob(draft.tokens)
    if draft.q is None:
        return log_p
    log_q = draft.q.log_prob(draft.tokens)
    if draft.drawn is not None:
        log_q = log_q.masked_fill(~draft.drawn, 0.0)
    return torch.where(torch.isneginf(log_p), log_p, log_p - log_q)  # 0/0: an impossible token stays impossible


def draft_probs(draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], like: Tensor) -> Float[Tensor, "N V"]:
    """Return q at these places, dense: the declared distribution, or a point mass on a chosen token."""
    if draft.q is not None and draft.drawn is None:
        return draft.q.probs_at(rows, at)
    dense = torch.zeros_like(like).scatter_(-1, draft.tokens[rows, at].clamp_min(0)[:, None], 1.0)
    if draft.q is None or draft.drawn is None:
        return dense
    return torch.where(draft.drawn[rows, at][:, None], draft.q.probs_at(rows, at), dense)


def draft_prob_of(
    draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], tokens: Int[Tensor, "N M"]
) -> Float[Tensor, "N M"]:
    """Return q of M tokens at each of these places."""
    chosen = (tokens == draft.tokens[rows, at][:, None]).double()
    if draft.q is None:
        return chosen
    drawn = draft.q.log_probs_at(rows, at, tokens).exp()
    return drawn if draft.drawn is None else torch.where(draft.drawn[rows, at][:, None], drawn, chosen)


def drafted_probs(draft: Draft) -> Float[Tensor, "B K"]:
    """Return q of every draft token; 1 where it was chosen."""
    if draft.q is None:
        return torch.ones_like(draft.tokens, dtype=torch.float64)
    drawn = draft.q.log_prob(draft.tokens).exp()
    return drawn if draft.drawn is None else drawn.masked_fill(~draft.drawn, 1.0)


def slot_distributions(draft: Draft, dist: Distribution) -> Float[Tensor, "B K V"]:
    """Return q of every slot, dense, without a device sync. `dist` is the draft's q; chosen slots are point masses."""
    q = dist.probs()
    if draft.drawn is None:
        return q
    drawn, tokens = draft.drawn[..., None], draft.tokens.clamp_min(0)[..., None]
    q.masked_fill_(~drawn, 0.0)
    return q.scatter_(-1, tokens, torch.where(drawn, q.gather(-1, tokens), 1.0))


def excess(
    p: Float[Tensor, "N V"], draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"]
) -> Float[Tensor, "N V"]:
    """Return max(0, p − q) at these places, overwriting `p`. After the end of a draft q is 0."""
    inside = at < draft.lengths[rows]
    if draft.tokens.shape[1] == 0 or not bool(inside.any()):
        return p
    q = draft_probs(draft, rows, at.clamp_max(draft.tokens.shape[1] - 1), p)
    if not bool(inside.all()):
        q.masked_fill_(~inside[:, None], 0.0)
    return p.sub_(q).clamp_min_(0)


def weighted_excess(
    p: Distribution, draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], weight: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
    """Return max(0, w·p − q) divided by a factor per place, and the factors. All places must lie inside a draft."""
    here, gain = p.weights_at(rows, at)
    factor = weight * gain
    by_row = row_by_row(len(here), here.shape[-1], here.device)
    if draft.q is None or draft.drawn is not None or draft.q.vocab is not None or not by_row:
        here.mul_(factor.to(here.dtype)[:, None]).sub_(draft_probs(draft, rows, at, here))
        return here.clamp_min_(0), torch.ones_like(factor)
    q, q_gain = draft.q.weights_at(rows, at)
    # w·p − q = factor · (here − q · q_gain / factor): one pass less than scaling both. Where w = 0 the mass is 0 too
    ratio = torch.where(factor > 0, q_gain / factor, 0.0).clamp_max(torch.finfo(here.dtype).max)
    for p_row, q_row, c in zip(here, q, ratio.tolist(), strict=True):
        p_row.sub_(q_row, alpha=c)
    return here.clamp_min_(0), factor


def verdict(draft: Draft, accepted: Int[Tensor, " B"], last: Int[Tensor, " B"]) -> Verdict:
    """Write a chain's verdict: the accepted draft tokens, the round's last token, then PAD."""
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1), value=PAD)
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= accepted[:, None]
    tokens = tokens.masked_fill(beyond, PAD).scatter_(1, accepted[:, None], last[:, None])
    return Verdict(tokens, accepted)
