"""What the chain rules share: a draft's own law at a place, what is left of p there, and how a verdict is written."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.law import FEW, Law
from draftproof.core.types import PAD, Draft, Inexact, Verdict


def refuse_inexact(draft: Draft, rule: str) -> None:
    """Refuse what this chain rule would get wrong."""
    if draft.parents is not None:
        raise Inexact(f'rule="{rule}" verifies chains, and this draft is a tree (it has parents): use rule="tree"')
    if draft.shared_noise:
        raise Inexact(
            f'this draft was drawn with the target\'s own noise; under rule="{rule}" that is a bias. '
            'Use rule="coupled", or draw the draft with DRAFT noise'
        )


def real(draft: Draft) -> Bool[Tensor, "B K"]:
    """Which slots hold a token."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[:, None]


def log_ratios(p: Law, draft: Draft) -> Float[Tensor, "B K"]:
    """log p(x) − log q(x) of every drafted token x; q is 1 where it was chosen."""
    log_p = p.head(draft.tokens.shape[1]).log_prob(draft.tokens)
    if draft.law is None:
        return log_p
    log_q = draft.law.log_prob(draft.tokens)
    if draft.drawn is not None:
        log_q = log_q.masked_fill(~draft.drawn, 0.0)
    return torch.where(torch.isneginf(log_p), log_p, log_p - log_q)  # 0/0: an impossible token stays impossible


def draft_probs(draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], like: Tensor) -> Float[Tensor, "N V"]:
    """q at these places, dense: the declared law, or a point mass on a chosen token."""
    if draft.law is not None and draft.drawn is None:
        return draft.law.probs_at(rows, at)
    dense = torch.zeros_like(like).scatter_(-1, draft.tokens[rows, at].clamp_min(0)[:, None], 1.0)
    if draft.law is None or draft.drawn is None:
        return dense
    return torch.where(draft.drawn[rows, at][:, None], draft.law.probs_at(rows, at), dense)


def draft_prob_of(
    draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], tokens: Int[Tensor, "N M"]
) -> Float[Tensor, "N M"]:
    """q of several tokens at each of these places."""
    chosen = (tokens == draft.tokens[rows, at][:, None]).double()
    if draft.law is None:
        return chosen
    drawn = draft.law.log_probs_at(rows, at, tokens).exp()
    return drawn if draft.drawn is None else torch.where(draft.drawn[rows, at][:, None], drawn, chosen)


def drafted_probs(draft: Draft) -> Float[Tensor, "B K"]:
    """q of every drafted token, 1 where it was chosen."""
    if draft.law is None:
        return torch.ones_like(draft.tokens, dtype=torch.float64)
    drawn = draft.law.log_prob(draft.tokens).exp()
    return drawn if draft.drawn is None else drawn.masked_fill(~draft.drawn, 1.0)


def slot_laws(draft: Draft, law: Law) -> Float[Tensor, "B K V"]:
    """q of every slot, dense; `law` is the draft's own. `draft_probs` of all places at once, without a look at them."""
    q = law.probs()
    if draft.drawn is None:
        return q
    drawn, tokens = draft.drawn[..., None], draft.tokens.clamp_min(0)[..., None]
    q.masked_fill_(~drawn, 0.0)
    return q.scatter_(-1, tokens, torch.where(drawn, q.gather(-1, tokens), 1.0))


def excess(
    p: Float[Tensor, "N V"], draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"]
) -> Float[Tensor, "N V"]:
    """max(0, p − q) at these places; q is 0 behind the end of a draft. `p` is written over."""
    inside = at < draft.lengths[rows]
    if draft.tokens.shape[1] == 0 or not bool(inside.any()):
        return p
    q = draft_probs(draft, rows, at.clamp_max(draft.tokens.shape[1] - 1), p)
    if not bool(inside.all()):
        q.masked_fill_(~inside[:, None], 0.0)
    return p.sub_(q).clamp_min_(0)


def weighted_excess(
    p: Law, draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], weight: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
    """max(0, w·p − q) at places inside their drafts, up to a factor for each row; and that factor."""
    here, gain = p.weights_at(rows, at)
    factor = weight * gain
    if draft.law is None or draft.drawn is not None or draft.law.vocab is not None or len(rows) > FEW:
        here.mul_(factor.to(here.dtype)[:, None]).sub_(draft_probs(draft, rows, at, here))
        return here.clamp_min_(0), torch.ones_like(factor)
    q, q_gain = draft.law.weights_at(rows, at)
    # w·p − q = factor · (here − q · q_gain / factor): a pass less than scaling both. Without weight nothing is left
    ratio = torch.where(factor > 0, q_gain / factor, 0.0).clamp_max(torch.finfo(here.dtype).max)
    for mine, its, c in zip(here, q, ratio.tolist(), strict=True):
        mine.sub_(its, alpha=c)
    return here.clamp_min_(0), factor


def verdict(draft: Draft, accepted: Int[Tensor, " B"], closing: Int[Tensor, " B"]) -> Verdict:
    """The kept tokens, the closing one, then PAD."""
    tokens = torch.nn.functional.pad(draft.tokens, (0, 1), value=PAD)
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= accepted[:, None]
    tokens = tokens.masked_fill(beyond, PAD).scatter_(1, accepted[:, None], closing[:, None])
    return Verdict(tokens, accepted)
