"""Make small random worlds for the enumerator: targets, drafters and every draft they can propose."""

from itertools import product

import torch
from torch import Tensor

from draftproof.auditor.enumerate import Scenarios
from draftproof.core.distribution import Distribution
from draftproof.core.types import PAD, Draft

Tables = list[Tensor]  # one for each depth d: [N, V^d, V]


def random_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return probability rows of every awkward kind: with zeros, with ties, one-hot, and ordinary ones."""
    rows = torch.rand(shape, generator=generator, dtype=torch.float64).pow(3) + 1e-3
    kind = torch.rand(shape[:-1], generator=generator)[..., None]
    zeros = torch.rand(shape, generator=generator) < 0.4
    rows = torch.where((kind < 0.3) & zeros, 0.0, rows)
    rows = torch.where((kind > 0.3) & (kind < 0.45), (rows * 8).ceil() / 8, rows)  # ties
    best = torch.nn.functional.one_hot(rows.argmax(-1), shape[-1]).double()
    rows = torch.where((kind > 0.45) & (kind < 0.55), best, rows)
    rows = torch.where(rows.sum(-1, keepdim=True) > 0, rows, best)
    return rows / rows.sum(-1, keepdim=True)


def random_tables(
    N: int, V: int, depth: int, generator: torch.Generator, *, full: bool = False
) -> tuple[Tables, Tables]:
    """Return targets and drafters that depend on the whole prefix: identical, disjoint, mixed or unrelated.

    `full` means without zeros.
    """
    target = [random_rows((N, V**d, V), generator) for d in range(depth + 1)]
    drafter = []
    for p in target:
        other = random_rows(tuple(p.shape), generator)
        mix = torch.rand(p.shape[:-1], generator=generator)[..., None]
        apart = (p == 0).double()
        apart = torch.where(apart.sum(-1, keepdim=True) > 0, apart / apart.sum(-1, keepdim=True).clamp_min(1), other)
        q = torch.where(mix < 0.2, p, torch.where(mix < 0.3, apart, torch.where(mix < 0.7, (p + other) / 2, other)))
        drafter.append(q)
    if full:
        target, drafter = ([0.9 * rows + 0.1 / V for rows in tables] for tables in (target, drafter))
    return target, drafter


def joint_distribution(target: Tables) -> Tensor:
    """Return the distribution of whole texts, flat: [N, V^(depth + 1)]."""
    dist = target[0].flatten(1)
    for rows in target[1:]:
        dist = (dist[..., None] * rows).flatten(1)
    return dist


def chains(N: int, V: int, K: int, seed: int, *, kind: str = "drawn", full: bool = False) -> Scenarios:
    """Enumerate the chains of N worlds of a kind: drawn, chosen, mixed (some positions), ragged (stops by prefix)."""
    generator = torch.Generator().manual_seed(seed)
    target, drafter = random_tables(N, V, K, generator, full=full)
    tokens = torch.tensor(list(product(range(V), repeat=K))).reshape(-1, K)
    X = len(tokens)
    chance = torch.ones((N, X), dtype=torch.float64)
    lengths = torch.full((N, X), K)
    q_rows, drawn = [], torch.ones((N, X, K), dtype=torch.bool)
    code = torch.zeros(X, dtype=torch.long)
    p_rows = [target[0][:, code]]
    for i in range(K):
        q = drafter[i][:, code]
        is_chosen = torch.rand((N, V**i), generator=generator) < {"chosen": 2.0, "mixed": 0.5}.get(kind, -1.0)
        choice = torch.randint(V, (N, V**i), generator=generator)
        drawn[:, :, i] = ~is_chosen[:, code]
        dist = torch.where(drawn[:, :, i : i + 1], q, torch.nn.functional.one_hot(choice[:, code], V).double())
        if kind == "ragged":
            stops = (torch.rand((N, V**i), generator=generator) < 0.3)[:, code] & (lengths == K)
            lengths = torch.where(stops, i, lengths)
        prob = dist.gather(-1, tokens[:, i].expand(N, X)[..., None])[..., 0]
        chance = chance * torch.where(lengths == K, prob, 1.0 / V)  # after a stop all continuations are one draft
        q_rows.append(q)
        code = code * V + tokens[:, i]
        p_rows.append(target[i + 1][:, code])
    p = Distribution.of(torch.stack(p_rows, 2).flatten(0, 1))
    q_dist = None if kind == "chosen" else Distribution.of(torch.stack(q_rows, 2).flatten(0, 1))
    draft = Draft(tokens.repeat(N, 1), lengths.flatten(), q_dist, drawn.flatten(0, 1) if kind == "mixed" else None)
    return _possible(joint_distribution(target), chance, p, draft)


TREES = {
    "chain": [-1, 0, 1],
    "siblings": [-1, -1, -1],
    "fork": [-1, 0, 0, -1],
    "two chains": [-1, 0, -1, 2],
    "broad": [-1, -1, 0, 1],
}


def trees(N: int, V: int, shape: list[int], seed: int, *, kind: str) -> Scenarios:
    """Enumerate the trees of this shape of a kind: iid, without (replacement), chosen, mixed (any of these)."""
    generator = torch.Generator().manual_seed(seed)
    K = len(shape)
    depths = [0] * K
    for i, parent in enumerate(shape):
        depths[i] = 0 if parent < 0 else depths[parent] + 1
    target, drafter = random_tables(N, V, max(depths) + 1, generator)
    tokens = torch.tensor(list(product(range(V), repeat=K)))
    X = len(tokens)
    chance = torch.ones((N, X), dtype=torch.float64)
    codes = [torch.zeros(X, dtype=torch.long)]
    p_rows, q_rows, drawn = [target[0][:, codes[0]]], [], torch.ones((N, X, K), dtype=torch.bool)
    for i, parent in enumerate(shape):
        above, d = codes[parent + 1], depths[i]
        q = drafter[d][:, above]
        mode = torch.randint(3, (N, 1, 1), generator=generator)
        mode = {"iid": mode * 0, "without": mode * 0 + 1, "chosen": mode * 0 + 2, "mixed": mode}[kind]
        earlier = torch.zeros((X, V), dtype=torch.bool)
        for j in range(i):
            if shape[j] == parent:
                earlier.scatter_(1, tokens[:, j : j + 1], True)
        rest = q.masked_fill(earlier, 0.0)
        # Where earlier siblings have used up q: any fixed distribution on the other tokens.
        spare = (~earlier).double() + earlier.all(-1, keepdim=True)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, spare)
        rest = rest / rest.sum(-1, keepdim=True)
        choice = torch.randint(V, (N, V**d), generator=generator)[:, above]
        q = torch.where(mode == 1, rest, q)
        dist = torch.where(mode == 2, torch.nn.functional.one_hot(choice, V).double(), q)
        chance = chance * dist.gather(-1, tokens[:, i].expand(N, X)[..., None])[..., 0]
        drawn[:, :, i] = (mode != 2)[..., 0]
        q_rows.append(q)
        codes.append(above * V + tokens[:, i])
        p_rows.append(target[d + 1][:, codes[-1]])
    p = Distribution.of(torch.stack(p_rows, 2).flatten(0, 1))
    q_dist = None if kind == "chosen" else Distribution.of(torch.stack(q_rows, 2).flatten(0, 1))
    draft = Draft(
        tokens.repeat(N, 1),
        torch.full((N * X,), K),
        q_dist,
        drawn.flatten(0, 1) if kind == "mixed" else None,
        torch.tensor(shape).expand(N * X, K),
    )
    return _possible(joint_distribution(target), chance, p, draft)


def _possible(joint: Tensor, chance: Tensor, p: Distribution, draft: Draft) -> Scenarios:
    """Return the drafts that have a positive probability."""
    world = torch.arange(len(joint)).repeat_interleave(chance.shape[1])
    made = (chance.flatten() > 0).nonzero()[:, 0]
    return Scenarios(joint, world[made], chance.flatten()[made], take_distribution(p, made), take_draft(draft, made))


def take_distribution(dist: Distribution, rows: Tensor) -> Distribution:
    return Distribution(
        dist.logits[rows], dist.scale[rows], dist.cutoff[rows], dist.lse[rows], dist.point[rows], dist.vocab
    )


def take_draft(draft: Draft, rows: Tensor) -> Draft:
    def some(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[rows]

    return Draft(
        draft.tokens[rows],
        draft.lengths[rows],
        None if draft.q is None else take_distribution(draft.q, rows),
        some(draft.drawn),
        some(draft.parents),
    )


__all__ = [
    "PAD",
    "TREES",
    "chains",
    "joint_distribution",
    "random_rows",
    "random_tables",
    "take_distribution",
    "take_draft",
    "trees",
]
