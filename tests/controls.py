"""Wrong verifiers with real defects of published implementations: each must fail the tests that the exact rules pass.

A wrong *stop table* is caught by enumeration, without sampling. A wrong *verifier* has the right stop table and misuses
its random numbers: only sampling in a loop detects it. A wrong *drafter* declares another distribution than it drew
from. `test_controls.py` runs all of them and prints which test caught which; `docs/controls.md` is that table. Its
descriptions are the docstrings below.
"""

import torch
from torch import Tensor

import loop
from draftproof.core.distribution import Distribution, normalise, residual
from draftproof.core.draw import close, draw
from draftproof.core.rng import Philox, Purpose
from draftproof.core.tree import real
from draftproof.core.types import Draft, Verdict
from draftproof.rules.block import block as block_rule
from draftproof.rules.block import stop_table as block_stop_table
from draftproof.rules.chain import StopTable, draft_probs, log_ratios, verdict
from draftproof.rules.coupled import coupled as coupled_rule
from draftproof.rules.token import leading
from draftproof.rules.token import stop_table as token_stop_table
from draftproof.rules.token import token as token_rule
from draftproof.rules.tree import Walk
from draftproof.rules.tree import stop_table as tree_stop_table

# ------------------------------------------------------------------ wrong stop tables: caught by enumeration


def dense(p: Distribution) -> Tensor:
    return p.probs()


def residual_skipped(p: Distribution, draft: Draft) -> StopTable:
    """A rejected position is drawn from p."""
    right = token_stop_table(p, draft)
    return StopTable(right.node, right.chance, dense(p))


def residual_swapped(p: Distribution, draft: Draft) -> StopTable:
    """max(0, q − p) instead of max(0, p − q)."""
    right = token_stop_table(p, draft)
    rows = torch.arange(len(draft.tokens))
    dists = dense(p).clone()
    for i in range(draft.tokens.shape[1]):
        q = draft_probs(draft, rows, torch.full_like(rows, i), dists[:, i])
        dists[:, i] = torch.where((i < draft.lengths)[:, None], residual(q, dists[:, i]), dists[:, i])
    return StopTable(right.node, right.chance, dists)


def residual_not_clamped(p: Distribution, draft: Draft) -> StopTable:
    """The absolute difference of p and q instead of max(0, p − q)."""
    right = token_stop_table(p, draft)
    rows = torch.arange(len(draft.tokens))
    dists = dense(p).clone()
    for i in range(draft.tokens.shape[1]):
        q = draft_probs(draft, rows, torch.full_like(rows, i), dists[:, i])
        apart = normalise((dists[:, i] - q).abs(), dists[:, i])
        dists[:, i] = torch.where((i < draft.lengths)[:, None], apart, dists[:, i])
    return StopTable(right.node, right.chance, dists)


def coins_times_nine_tenths(p: Distribution, draft: Draft) -> StopTable:
    """Accepts a little more than it should: min(1, p/(0.9·q))."""
    right = token_stop_table(p, draft)
    keep = (log_ratios(p, draft).exp() / 0.9).clamp_max(1).masked_fill(~real(draft), 0.0)
    return StopTable(right.node, torch.cat([1 - keep, right.chance[:, -1:]], 1), right.closing)


def bonus_from_the_residual(p: Distribution, draft: Draft) -> StopTable:
    """After a fully accepted draft, the bonus token is drawn as if the last draft token had been rejected."""
    right = token_stop_table(p, draft)
    dists = right.closing.clone()
    rows = torch.arange(len(draft.tokens))
    last = (draft.lengths - 1).clamp_min(0)
    q = draft_probs(draft, rows, last, dists[:, 0])
    dists[rows, draft.lengths] = torch.where(
        (draft.lengths > 0)[:, None], residual(dists[rows, draft.lengths], q), dists[rows, draft.lengths]
    )
    return StopTable(right.node, right.chance, dists)


def block_stops_at_the_first_failure(p: Distribution, draft: Draft) -> StopTable:
    """Scans from the front and keeps up to the first failed coin, not to the deepest success."""
    right = block_stop_table(p, draft)
    B, S = right.node.shape
    order = (draft.lengths[:, None] - torch.arange(S)).clamp_min(0)  # the same stopping points, front first
    keep = torch.ones((B, S), dtype=torch.float64).scatter(1, right.node, right.chance)  # chance to keep i tokens
    goes_on = torch.cat([keep[:, 1:], torch.zeros(B, 1).double()], 1)
    at = torch.arange(S).expand(B, S)
    chance = torch.where(at < draft.lengths[:, None], 1 - goes_on, 1.0)
    dists = torch.empty_like(right.closing).scatter(1, order[..., None].expand_as(right.closing), right.closing)
    return StopTable(at, chance, dists)


def block_last_test_uncapped(p: Distribution, draft: Draft) -> StopTable:
    """The full draft is tested with the raw joint ratio, not with the capped weight (read in a public repository)."""
    right = block_stop_table(p, draft)
    whole = log_ratios(p, draft).masked_fill(~real(draft), 0.0).sum(-1).clamp_max(0).exp()
    chance = right.chance.clone()
    chance[:, 0] = torch.where(draft.lengths > 0, whole, 1.0)
    return StopTable(right.node, chance, right.closing)


def block_with_the_token_residual(p: Distribution, draft: Draft) -> StopTable:
    """Block thresholds with the residual of token verification: the block weight is forgotten."""
    right, token_distributions = block_stop_table(p, draft), token_stop_table(p, draft).closing
    dists = token_distributions.gather(1, right.node[..., None].expand_as(token_distributions))
    return StopTable(right.node, right.chance, dists)


def block_with_token_thresholds(p: Distribution, draft: Draft) -> StopTable:
    """min(1, p/q) of the last token in place of h, deepest success first."""
    right = block_stop_table(p, draft)
    keep = log_ratios(p, draft).clamp_max(0).exp()
    chance = torch.cat([torch.ones(len(keep), 1).double(), keep], 1).gather(1, right.node)
    return StopTable(right.node, chance, right.closing)


def chosen_scored_with_softmax(p: Distribution, draft: Draft) -> StopTable:
    """Chosen tokens are tested against the drafter's softmax as if they had been drawn from it."""
    return token_stop_table(p, Draft(draft.tokens, draft.lengths, draft.q))


def raw_q_for_sharpened_drafts(p: Distribution, draft: Draft) -> StopTable:
    """Drafts drawn at a low temperature are tested against q at temperature 1."""
    assert draft.q is not None
    q = draft.q.probs()
    raw = Distribution.of(normalise(q.sqrt(), q))
    return block_stop_table(p, Draft(draft.tokens, draft.lengths, raw))


def siblings_against_the_same_p(p: Distribution, draft: Draft) -> StopTable:
    """A tree whose rejected slots are not taken out of the parent's distribution."""
    right = Walk._reject
    try:
        Walk._reject = lambda self, rows, node: None  # type: ignore[method-assign]
        return tree_stop_table(p, draft)
    finally:
        Walk._reject = right  # type: ignore[method-assign]


def traversal_weight_of_a_port(p: Distribution, draft: Draft) -> StopTable:
    """The parent's weight becomes Z/(1 − q(rejected token)) instead of Z/(Z + 1 − w)."""
    right = Walk._reject

    def wrong(self: Walk, rows: Tensor, node: Tensor) -> None:
        parent = self.shape.parent[rows, node - 1]
        dist = self.dist[rows, parent]
        q = draft_probs(self.draft, rows, node - 1, dist)
        spare = (dist * self.weight[rows, parent].to(dist.dtype)[:, None] - q).clamp_min(0)
        rest = 1 - q.gather(1, self.draft.tokens[rows, node - 1][:, None])[:, 0]
        self.weight[rows, parent] = (spare.sum(-1) / rest.clamp_min(1e-300)).clamp_max(1.0)
        self.dist[rows, parent] = normalise(spare, dist)

    try:
        Walk._reject = wrong  # type: ignore[method-assign]
        return tree_stop_table(p, draft)
    finally:
        Walk._reject = right  # type: ignore[method-assign]


def siblings_with_the_first_ones_distribution(p: Distribution, draft: Draft) -> StopTable:
    """Siblings drawn without replacement are all tested against the distribution of the first."""
    assert draft.q is not None
    assert draft.parents is not None
    probs = draft.q.probs().clone()
    for i in range(1, draft.tokens.shape[1]):
        for j in range(i):
            same = (draft.parents[:, i] == draft.parents[:, j])[:, None]
            probs[:, i] = torch.where(same, probs[:, j], probs[:, i])
    dist = Distribution.of(torch.where(probs > 0, probs, 1e-12))
    return tree_stop_table(p, Draft(draft.tokens, draft.lengths, dist, draft.drawn, draft.parents))


# ------------------------------------------------------------------ wrong verifiers: caught in a loop


def coin_reused_for_closing(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """The coin that rejected a token also draws its replacement."""
    K = draft.tokens.shape[1]
    coins = rng.coins(K)
    accepted = leading((coins.log() < log_ratios(p, draft)) & real(draft))
    rows = torch.arange(len(accepted))
    dists = token_stop_table(p, draft).closing[rows, accepted]
    fresh = rng.uniform(Purpose.CLOSE, torch.zeros(1, dtype=torch.long))[:, 0]
    coin = torch.where(accepted < draft.lengths, coins[rows, accepted.clamp_max(K - 1)], fresh)
    return verdict(draft, accepted, draw(dists, torch.zeros_like(coin), coin))  # one chunk: the second number decides


def draft_noise_reused_for_closing(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """The random numbers that drew the rejected token also draw its replacement."""
    right = token_rule(p, draft, rng)
    rows = torch.arange(len(right.accepted))
    dists = token_stop_table(p, draft).closing[rows, right.accepted]
    zero = torch.zeros(1, dtype=torch.long)
    pairs = [rng.pair(Purpose.DRAFT, zero, j) for j in range(draft.tokens.shape[1] + 1)]
    first, second = (torch.cat(part, 1)[rows, right.accepted] for part in zip(*pairs, strict=True))
    return verdict(draft, right.accepted, draw(dists, first, second))


class PositionCoins(Philox):
    """Coins addressed by token *position*: a coin that block verification used is used again in the next round."""

    def coins(self, K: int) -> Tensor:
        return torch.cat(
            [Philox(self.seeds, self.starts + j).uniform(Purpose.ACCEPT, torch.zeros(1).long()) for j in range(K)], 1
        )


def coins_thrown_twice(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Block coins are addressed by token position: a coin used in one round is used again in the next."""
    return block_rule(p, draft, PositionCoins(rng.seeds, rng.starts))


def coins_of_the_first_round(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """`starts` is ignored: every round uses the same coins."""
    return token_rule(p, draft, Philox(rng.seeds, torch.ones_like(rng.starts)))


def shared_noise_under_token(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Drafts drawn with the target's own random numbers, the round's last token by the same race, tested with p/q."""
    plain = Draft(draft.tokens, draft.lengths, draft.q)
    accepted = token_rule(p, plain, rng).accepted
    rows = torch.arange(len(accepted))
    ended = coupled_rule(
        Distribution.of(token_stop_table(p, plain).closing[rows, accepted][:, None]),
        Draft(draft.tokens[:, :0], torch.zeros_like(draft.lengths)),
        Philox(rng.seeds, rng.starts + accepted),
    )
    return verdict(draft, accepted, ended.tokens[:, 0])


def redraws_after_a_mismatch(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """n-gram verification that draws from p, compares, and on a mismatch draws once more instead of emitting it."""
    K = draft.tokens.shape[1]
    dists = dense(p)
    lanes = torch.arange(1, K + 1)
    first, second = rng.pair(Purpose.CLOSE, lanes)
    sampled = torch.stack([draw(dists[:, i], first[:, i], second[:, i]) for i in range(K)], 1)
    accepted = leading((sampled == draft.tokens) & real(draft))
    rows = torch.arange(len(accepted))
    return verdict(draft, accepted, close(dists[rows, accepted], rng))


def first_coin_halved(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """The coin of the first token of a round is halved."""

    class Halved(Philox):
        def coins(self, K: int) -> Tensor:
            coins = Philox(self.seeds, self.starts).coins(K)
            return torch.cat([coins[:, :1] * 0.5, coins[:, 1:]], 1)

    return block_rule(p, draft, Halved(rng.seeds, rng.starts))


# ------------------------------------------------------------------ wrong drafters: caught in a loop


def weak_tokens_discarded(last: Tensor, rng: Philox) -> Draft:
    """A drawn token that looks weak is thrown away, and only what came before it is submitted."""
    draft = loop.drawn(last, rng)
    assert draft.q is not None
    strong = draft.q.log_prob(draft.tokens).exp() > 0.25
    return Draft(draft.tokens, leading(strong), draft.q)


def argmax_with_softmax_q(last: Tensor, rng: Philox) -> Draft:
    """Greedy drafts, declared as drawn from the softmax."""
    best, drawn = loop.chosen(last, rng), loop.drawn(last, rng)
    probs = torch.stack([loop.distribution_of(t, loop.DRAFTER).probs() for t in [last, *best.tokens.unbind(1)][:-1]], 1)
    return Draft(best.tokens, drawn.lengths, Distribution.of(probs))


STOP_TABLES = {
    residual_skipped: "drawn",
    residual_swapped: "drawn",
    residual_not_clamped: "drawn",
    coins_times_nine_tenths: "drawn",
    bonus_from_the_residual: "drawn",
    block_stops_at_the_first_failure: "drawn",
    block_last_test_uncapped: "drawn",
    block_with_the_token_residual: "drawn",
    block_with_token_thresholds: "drawn",
    raw_q_for_sharpened_drafts: "drawn",
    chosen_scored_with_softmax: "mixed",
    siblings_against_the_same_p: "tree iid",
    traversal_weight_of_a_port: "tree iid",
    siblings_with_the_first_ones_distribution: "tree without",
}
VERIFIERS = {
    coin_reused_for_closing: "drawn",
    draft_noise_reused_for_closing: "drawn",
    coins_thrown_twice: "drawn",
    coins_of_the_first_round: "drawn",
    shared_noise_under_token: "shared",
    redraws_after_a_mismatch: "chosen",
    first_coin_halved: "drawn",
}
DRAFTERS = {weak_tokens_discarded: "block", argmax_with_softmax_q: "token"}
