"""Generate many texts from a tiny first-order target, round by round, and count them.

The joint distribution is known exactly. The rules run as users get them: float32, Philox, batched, and with drafts that
a drafter really drew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.core.distribution import Distribution, propose
from draftproof.core.rng import Philox
from draftproof.core.types import PAD, Draft, Verdict

V, K, L = 4, 3, 3  # tokens, draft length, tokens of a text whose joint distribution is tested
START = 0


def table(seed: int, scale: float = 1.3) -> Tensor:
    return torch.randn((V, V), generator=torch.Generator().manual_seed(seed)) * scale


TARGET, DRAFTER = table(1), table(2)


def distribution_of(rows: Tensor, logits: Tensor) -> Distribution:
    """Return the distributions after these tokens."""
    probs = logits.softmax(-1)[rows]
    return Distribution.of(probs)


def joint() -> Tensor:
    """Return the exact distribution of the first L tokens, flat."""
    p = TARGET.double().softmax(-1)
    dist = p[START]
    for _ in range(L - 1):
        dist = dist[..., None] * p.view((1,) * (dist.ndim - 1) + (V, V))
    return dist.flatten()


Proposer = Callable[[Tensor, Philox], Draft]


def drawn(last: Tensor, rng: Philox) -> Draft:
    """Propose K tokens drawn from the drafter's table."""
    tokens, probs = [], []
    for j in range(K):
        dist = distribution_of(last, DRAFTER)
        last = propose(dist, rng, j)
        tokens.append(last)
        probs.append(dist.probs())
    lengths = torch.full_like(last, K)
    return Draft(torch.stack(tokens, 1), lengths, Distribution.of(torch.stack(probs, 1)), shared_rng=rng.shared)


def chosen(last: Tensor, rng: Philox) -> Draft:
    """Propose the drafter's K likeliest tokens, which are chosen and have no q."""
    tokens = []
    for _ in range(K):
        last = DRAFTER.argmax(-1)[last]
        tokens.append(last)
    return Draft(torch.stack(tokens, 1), torch.full_like(last, K))


def mixed(last: Tensor, rng: Philox) -> Draft:
    """Propose drawn tokens in some rows and chosen ones in others, of lengths 0 to K by the last token."""
    one, other = drawn(last, rng), chosen(last, rng)
    by_draw = (last % 2 == 0)[:, None].expand(-1, K)
    return Draft(torch.where(by_draw, one.tokens, other.tokens), (last + 1) % (K + 1), one.q, by_draw)


def tree(last: Tensor, rng: Philox) -> Draft:
    """Propose two drawn siblings (with replacement), a chosen one, and a drawn child of the first."""
    dist = distribution_of(last, DRAFTER)
    first, second = propose(dist, rng, 0), propose(dist, rng, 1)
    below = distribution_of(first, DRAFTER)
    child, best = propose(below, rng, 2), DRAFTER.argmax(-1)[last]
    probs = torch.stack([dist.probs(), below.probs(), dist.probs(), dist.probs()], 1)
    n = len(last)
    return Draft(
        torch.stack([first, child, second, best], 1),
        torch.full((n,), 4),
        Distribution.of(probs),
        torch.tensor([True, True, True, False]).expand(n, 4),
        torch.tensor([-1, 0, -1, -1]).expand(n, 4),
    )


@dataclass(frozen=True)
class Texts:
    """How often each text of L tokens was generated, and the tokens emitted per round."""

    counts: Tensor
    tokens_per_round: float


Verify = Callable[[Distribution, Draft, Philox], Verdict]


def texts(
    verify: Verify,
    proposer: Proposer,
    S: int,
    *,
    shared: bool = False,
    starts: Callable[[Tensor], Tensor] = lambda t: t,
) -> Texts:
    """Generate S texts of at least L tokens and count their first L tokens."""
    batch, counts, emitted, rounds = 250_000, torch.zeros(V**L, dtype=torch.long), 0, 0
    for first in range(0, S, batch):
        n = min(batch, S - first)
        seeds, last = torch.arange(first, first + n) * 1_000_003, torch.full((n,), START)
        out, count = torch.full((n, L + K + 1), PAD), torch.zeros(n, dtype=torch.long)
        rows = torch.arange(n)
        while len(rows):
            rng = Philox(seeds[rows], starts(count[rows] + 1), shared)
            draft = proposer(last[rows], rng)
            follow = torch.cat([last[rows, None], draft.tokens], 1)
            verdict = verify(distribution_of(follow, TARGET), draft, Philox(rng.seeds, rng.starts))
            width = verdict.tokens.shape[1]
            at = count[rows, None] + torch.arange(width)
            keep = (verdict.tokens != PAD) & (at < out.shape[1])
            out[rows[:, None].expand_as(at)[keep], at[keep]] = verdict.tokens[keep]
            last[rows] = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
            count[rows] += verdict.accepted + 1
            emitted += int((verdict.accepted + 1).sum())
            rounds += len(rows)
            rows = rows[count[rows] < L]
        code = out[:, :L] @ torch.tensor([V ** (L - 1 - i) for i in range(L)])
        counts += torch.bincount(code, minlength=V**L)
    return Texts(counts, emitted / rounds)
