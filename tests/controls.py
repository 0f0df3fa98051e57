"""Wrong verifiers, taken from real defects (design notes: TRAPS, ALGORITHMS): each must be caught by the same tests.

A wrong *judge* is caught by enumeration, without sampling. A wrong *verifier*, which misuses its noise, has the right
judgement and the wrong coins: only sampling in a loop shows it. A wrong *drafter* declares another law than it drew
from. `test_controls.py` runs them all and prints which test caught which; `docs/controls.md` keeps that table.
"""

import torch
from torch import Tensor

import loop
from draftproof.core.closing import close
from draftproof.core.draw import draw
from draftproof.core.law import Law, normalise, residual
from draftproof.core.noise import Noise, Site
from draftproof.core.types import Draft, Verdict
from draftproof.verify import block as block_rule
from draftproof.verify import coupled as coupled_rule
from draftproof.verify import token as token_rule
from draftproof.verify.block import judge as judge_block
from draftproof.verify.chain import draft_probs, log_ratios, real, verdict
from draftproof.verify.judgement import Judgement
from draftproof.verify.token import judge as judge_token
from draftproof.verify.token import leading
from draftproof.verify.tree import Walk
from draftproof.verify.tree import judge as judge_tree

# ------------------------------------------------------------------ wrong judges: caught by enumeration


def dense(p: Law) -> Tensor:
    return p.probs()


def residual_skipped(p: Law, draft: Draft) -> Judgement:
    """A rejected position is drawn from p."""
    right = judge_token(p, draft)
    return Judgement(right.node, right.chance, dense(p))


def residual_swapped(p: Law, draft: Draft) -> Judgement:
    """max(0, q − p) instead of max(0, p − q)."""
    right = judge_token(p, draft)
    rows = torch.arange(len(draft.tokens))
    laws = dense(p).clone()
    for i in range(draft.tokens.shape[1]):
        q = draft_probs(draft, rows, torch.full_like(rows, i), laws[:, i])
        laws[:, i] = torch.where((i < draft.lengths)[:, None], residual(q, laws[:, i]), laws[:, i])
    return Judgement(right.node, right.chance, laws)


def residual_not_clamped(p: Law, draft: Draft) -> Judgement:
    """The absolute difference of p and q instead of max(0, p − q)."""
    right = judge_token(p, draft)
    rows = torch.arange(len(draft.tokens))
    laws = dense(p).clone()
    for i in range(draft.tokens.shape[1]):
        q = draft_probs(draft, rows, torch.full_like(rows, i), laws[:, i])
        apart = normalise((laws[:, i] - q).abs(), laws[:, i])
        laws[:, i] = torch.where((i < draft.lengths)[:, None], apart, laws[:, i])
    return Judgement(right.node, right.chance, laws)


def coins_times_nine_tenths(p: Law, draft: Draft) -> Judgement:
    """Keeps a little more than it should: min(1, p/(0.9·q))."""
    right = judge_token(p, draft)
    keep = (log_ratios(p, draft).exp() / 0.9).clamp_max(1).masked_fill(~real(draft), 0.0)
    return Judgement(right.node, torch.cat([1 - keep, right.chance[:, -1:]], 1), right.closing)


def bonus_from_the_residual(p: Law, draft: Draft) -> Judgement:
    """After a draft that was kept whole, the closing token is drawn as if its last token had been rejected."""
    right = judge_token(p, draft)
    laws = right.closing.clone()
    rows = torch.arange(len(draft.tokens))
    last = (draft.lengths - 1).clamp_min(0)
    q = draft_probs(draft, rows, last, laws[:, 0])
    laws[rows, draft.lengths] = torch.where(
        (draft.lengths > 0)[:, None], residual(laws[rows, draft.lengths], q), laws[rows, draft.lengths]
    )
    return Judgement(right.node, right.chance, laws)


def block_stops_at_the_first_failure(p: Law, draft: Draft) -> Judgement:
    """Scans from the front and keeps up to the first failed coin, not to the deepest success."""
    right = judge_block(p, draft)
    B, S = right.node.shape
    order = (draft.lengths[:, None] - torch.arange(S)).clamp_min(0)  # the same stations, front first
    keep = torch.ones((B, S), dtype=torch.float64).scatter(1, right.node, right.chance)  # chance to keep i tokens
    goes_on = torch.cat([keep[:, 1:], torch.zeros(B, 1).double()], 1)
    at = torch.arange(S).expand(B, S)
    chance = torch.where(at < draft.lengths[:, None], 1 - goes_on, 1.0)
    laws = torch.empty_like(right.closing).scatter(1, order[..., None].expand_as(right.closing), right.closing)
    return Judgement(at, chance, laws)


def block_last_test_uncapped(p: Law, draft: Draft) -> Judgement:
    """The full draft is tested with the raw joint ratio, not with the capped weight (read in a public repository)."""
    right = judge_block(p, draft)
    whole = log_ratios(p, draft).masked_fill(~real(draft), 0.0).sum(-1).clamp_max(0).exp()
    chance = right.chance.clone()
    chance[:, 0] = torch.where(draft.lengths > 0, whole, 1.0)
    return Judgement(right.node, chance, right.closing)


def block_with_the_token_residual(p: Law, draft: Draft) -> Judgement:
    """Block thresholds, but the closing law of token verification: the weight forgotten."""
    right, token_laws = judge_block(p, draft), judge_token(p, draft).closing
    laws = token_laws.gather(1, right.node[..., None].expand_as(token_laws))
    return Judgement(right.node, right.chance, laws)


def block_with_token_thresholds(p: Law, draft: Draft) -> Judgement:
    """min(1, p/q) of the last token in place of h, deepest success first."""
    right = judge_block(p, draft)
    keep = log_ratios(p, draft).clamp_max(0).exp()
    chance = torch.cat([torch.ones(len(keep), 1).double(), keep], 1).gather(1, right.node)
    return Judgement(right.node, chance, right.closing)


def chosen_scored_with_softmax(p: Law, draft: Draft) -> Judgement:
    """Chosen tokens are tested against the drafter's softmax as if they had been drawn from it."""
    return judge_token(p, Draft(draft.tokens, draft.lengths, draft.law))


def raw_q_for_sharpened_drafts(p: Law, draft: Draft) -> Judgement:
    """Drafts drawn at a low temperature are tested against q at temperature 1."""
    assert draft.law is not None
    q = draft.law.probs()
    raw = Law.of(normalise(q.sqrt(), q))
    return judge_block(p, Draft(draft.tokens, draft.lengths, raw))


def siblings_against_the_same_p(p: Law, draft: Draft) -> Judgement:
    """A tree whose rejected slots are not taken out of the parent's law."""
    kept = Walk._reject
    try:
        Walk._reject = lambda self, rows, node: None  # type: ignore[method-assign]
        return judge_tree(p, draft)
    finally:
        Walk._reject = kept  # type: ignore[method-assign]


def traversal_weight_of_a_port(p: Law, draft: Draft) -> Judgement:
    """The parent's weight becomes Z/(1 − q(rejected token)) instead of Z/(Z + 1 − w)."""
    kept = Walk._reject

    def wrong(self: Walk, rows: Tensor, node: Tensor) -> None:
        parent = self.shape.parent[rows, node - 1]
        law = self.law[rows, parent]
        q = draft_probs(self.draft, rows, node - 1, law)
        spare = (law * self.weight[rows, parent].to(law.dtype)[:, None] - q).clamp_min(0)
        rest = 1 - q.gather(1, self.draft.tokens[rows, node - 1][:, None])[:, 0]
        self.weight[rows, parent] = (spare.sum(-1) / rest.clamp_min(1e-300)).clamp_max(1.0)
        self.law[rows, parent] = normalise(spare, law)

    try:
        Walk._reject = wrong  # type: ignore[method-assign]
        return judge_tree(p, draft)
    finally:
        Walk._reject = kept  # type: ignore[method-assign]


def siblings_with_the_first_ones_law(p: Law, draft: Draft) -> Judgement:
    """Siblings drawn without replacement are all tested against the law of the first."""
    assert draft.law is not None
    assert draft.parents is not None
    probs = draft.law.probs().clone()
    for i in range(1, draft.tokens.shape[1]):
        for j in range(i):
            same = (draft.parents[:, i] == draft.parents[:, j])[:, None]
            probs[:, i] = torch.where(same, probs[:, j], probs[:, i])
    law = Law.of(torch.where(probs > 0, probs, 1e-12))
    return judge_tree(p, Draft(draft.tokens, draft.lengths, law, draft.drawn, draft.parents))


# ------------------------------------------------------------------ wrong verifiers: caught in a loop


def coin_reused_for_closing(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """The coin that rejected a token also draws its replacement."""
    K = draft.tokens.shape[1]
    coins = noise.coins(K)
    accepted = leading((coins.log() < log_ratios(p, draft)) & real(draft))
    rows = torch.arange(len(accepted))
    laws = judge_token(p, draft).closing[rows, accepted]
    fresh = noise.uniform(Site.CLOSE, torch.zeros(1, dtype=torch.long))[:, 0]
    coin = torch.where(accepted < draft.lengths, coins[rows, accepted.clamp_max(K - 1)], fresh)
    return verdict(draft, accepted, draw(laws, torch.zeros_like(coin), coin))  # one chunk: the second number decides


def draft_noise_reused_for_closing(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """The numbers that drew the rejected token draw its replacement."""
    right = token_rule(p, draft, noise)
    rows = torch.arange(len(right.accepted))
    laws = judge_token(p, draft).closing[rows, right.accepted]
    zero = torch.zeros(1, dtype=torch.long)
    pairs = [noise.pair(Site.DRAFT, zero, j) for j in range(draft.tokens.shape[1] + 1)]
    first, second = (torch.cat(part, 1)[rows, right.accepted] for part in zip(*pairs, strict=True))
    return verdict(draft, right.accepted, draw(laws, first, second))


class PositionCoins(Noise):
    """One coin a *position*: a coin that block verification looked at is thrown again in the next round."""

    def coins(self, K: int) -> Tensor:
        return torch.cat(
            [Noise(self.seeds, self.starts + j).uniform(Site.ACCEPT, torch.zeros(1).long()) for j in range(K)], 1
        )


def coins_thrown_twice(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """Block coins addressed by token position: one that was looked at is thrown again in the next round."""
    return block_rule(p, draft, PositionCoins(noise.seeds, noise.starts))


def coins_of_the_first_round(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """`starts` forgotten: every round throws the same coins."""
    return token_rule(p, draft, Noise(noise.seeds, torch.ones_like(noise.starts)))


def shared_noise_under_token(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """Drafts drawn with the target's own noise, the closing token by the same race, tested with p/q."""
    plain = Draft(draft.tokens, draft.lengths, draft.law)
    accepted = token_rule(p, plain, noise).accepted
    rows = torch.arange(len(accepted))
    ended = coupled_rule(
        Law.of(judge_token(p, plain).closing[rows, accepted][:, None]),
        Draft(draft.tokens[:, :0], torch.zeros_like(draft.lengths)),
        Noise(noise.seeds, noise.starts + accepted),
    )
    return verdict(draft, accepted, ended.tokens[:, 0])


def redraws_after_a_mismatch(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """n-gram verification that draws from p, compares, and on a mismatch draws once more instead of emitting it."""
    K = draft.tokens.shape[1]
    laws = dense(p)
    lanes = torch.arange(1, K + 1)
    first, second = noise.pair(Site.CLOSE, lanes)
    said = torch.stack([draw(laws[:, i], first[:, i], second[:, i]) for i in range(K)], 1)
    accepted = leading((said == draft.tokens) & real(draft))
    rows = torch.arange(len(accepted))
    return verdict(draft, accepted, close(laws[rows, accepted], noise))


def first_coin_halved(p: Law, draft: Draft, noise: Noise) -> Verdict:
    """The coin of the first token of a round is halved."""

    class Halved(Noise):
        def coins(self, K: int) -> Tensor:
            coins = Noise(self.seeds, self.starts).coins(K)
            return torch.cat([coins[:, :1] * 0.5, coins[:, 1:]], 1)

    return block_rule(p, draft, Halved(noise.seeds, noise.starts))


# ------------------------------------------------------------------ wrong drafters: caught in a loop


def weak_tokens_discarded(last: Tensor, noise: Noise) -> Draft:
    """A drawn token that looks weak is thrown away, and only what came before it is submitted."""
    draft = loop.drawn(last, noise)
    assert draft.law is not None
    strong = draft.law.log_prob(draft.tokens).exp() > 0.25
    return Draft(draft.tokens, leading(strong), draft.law)


def argmax_with_softmax_q(last: Tensor, noise: Noise) -> Draft:
    """Greedy drafts, declared as drawn from the softmax."""
    best, drawn = loop.chosen(last, noise), loop.drawn(last, noise)
    probs = torch.stack([loop.law_of(t, loop.DRAFTER).probs() for t in [last, *best.tokens.unbind(1)][:-1]], 1)
    return Draft(best.tokens, drawn.lengths, Law.of(probs))


JUDGES = {
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
    siblings_with_the_first_ones_law: "tree without",
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
