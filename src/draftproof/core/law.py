"""A law over tokens, held as logits and a few numbers a row; and the facts about two laws that exactness rests on.

Temperature, top-k, top-p and min-p all come down to three numbers for each row, a scale, a cutoff and a normaliser:

    p(t) = exp(scale · logit(t) − lse)   where logit(t) ≥ cutoff, and 0 elsewhere.

So nothing of the vocabulary's size is written until somebody asks for it. All logits equal to the cutoff are kept.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.draw import CHUNK, chunk_sums, draw
from draftproof.core.noise import Noise, Site
from draftproof.core.types import PAD


@dataclass(frozen=True, slots=True)
class Vocab:
    """A drafter's smaller vocabulary inside the target's: what is not in it has probability 0.

    `ids[r]` is the target's id of entry r; `entry[t]` is the entry of the target's token t, PAD where there is none.
    """

    ids: Int[Tensor, " R"]
    entry: Int[Tensor, " V"]

    @classmethod
    def of(cls, ids: Int[Tensor, " R"], V: int) -> "Vocab":
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= V):
            raise ValueError(f"draft_ids must lie in [0, {V}), the target's vocabulary; got up to {int(ids.max())}")
        if len(ids.unique()) != len(ids):
            raise ValueError("draft_ids names a token twice; each entry of the draft vocabulary is one token")
        entry = torch.full((V,), PAD, dtype=torch.long, device=ids.device)
        entry[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, entry)


@dataclass(frozen=True, slots=True)
class Law:
    """Laws of any number of rows, by reference to their logits.

    `point` is the one possible token of a greedy row, PAD elsewhere: temperature 0 is the limit law, a point mass on
    the first argmax, and never an infinite scale. `lse` is NaN where a row is no law at all: NaN or +inf among its
    logits, or nothing allowed. `scale` and `lse` are float64: log-probabilities are differences of large numbers.
    """

    logits: Float[Tensor, "*B R"]
    scale: Float[Tensor, "*B"]
    cutoff: Float[Tensor, "*B"]
    lse: Float[Tensor, "*B"]
    point: Int[Tensor, "*B"]
    vocab: Vocab | None = None

    @classmethod
    def of(cls, probs: Float[Tensor, "*B V"]) -> "Law":
        """The law with these probabilities, or with these weights normalised."""
        lse = probs.double().sum(-1).log()
        return cls(
            probs.log(),
            torch.ones_like(lse),
            torch.full_like(lse, -torch.inf, dtype=probs.dtype),
            lse.masked_fill(~torch.isfinite(lse), torch.nan),
            torch.full_like(lse, PAD, dtype=torch.long),
        )

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1] if self.vocab is None else len(self.vocab.entry)

    def at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> "Law":
        """The laws of N places out of [B, J]: nothing but their logits is copied."""
        index = (rows, positions)
        return Law(
            self.logits[index],
            self.scale[index],
            self.cutoff[index],
            self.lse[index],
            self.point[index],
            self.vocab,
        )

    def log_prob(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """log p(token), float64, −inf where impossible. A PAD is read as token 0: the caller masks what it padded."""
        return self.log_probs(tokens[..., None])[..., 0]

    def log_probs(self, tokens: Int[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
        """log p of several tokens a row."""
        tokens = tokens.clamp_min(0)
        entry = tokens if self.vocab is None else self.vocab.entry[tokens]
        logit = self.logits.gather(-1, entry.clamp_min(0))
        log_p = self.scale[..., None] * logit - self.lse[..., None]
        log_p.masked_fill_((logit < self.cutoff[..., None]) | (entry < 0), -torch.inf)
        point = self.point[..., None]
        return torch.where(point == PAD, log_p, torch.where(tokens == point, 0.0, -torch.inf))

    def probs(self) -> Float[Tensor, "*B V"]:
        """The dense rows, in the logits' precision and over the target's vocabulary."""
        dense = exponentials(self.logits, self.scale, self.lse, self.cutoff)
        if self.vocab is not None:
            dense = dense.new_zeros(*dense.shape[:-1], self.vocab_size).index_copy_(-1, self.vocab.ids, dense)
        certain = self.point != PAD
        if certain.any():
            dense[certain] = torch.nn.functional.one_hot(self.point[certain], self.vocab_size).to(dense.dtype)
        return dense

    def draw(self, noise: Noise, site: Site = Site.DRAFT, j: int = 0) -> Int[Tensor, " B"]:
        """One token a row: the j-th draw of the round for this site. For laws of shape [B]."""
        first, second = noise.pair(site, torch.zeros(1, dtype=torch.long, device=self.lse.device), j)
        return draw(self.probs(), first[:, 0], second[:, 0])


def exponentials(
    logits: Float[Tensor, "*B R"],
    scale: Float[Tensor, "*B"],
    lse: Float[Tensor, "*B"],
    cutoff: Float[Tensor, "*B"],
) -> Float[Tensor, "*B R"]:
    """exp(scale · logit − lse), and 0 below the cutoff.

    scale · logit and lse are both large and their difference small: subtracting lse / scale from the logit first, and
    making up for its rounding by a factor, keeps float32 rows right to 1e-7.
    """
    centre = (lse / scale).to(logits.dtype)
    gain = (scale * centre - lse).exp().to(logits.dtype)
    dense = logits - centre[..., None]
    dense.mul_(scale.to(logits.dtype)[..., None]).exp_().mul_(gain[..., None])
    if not torch.isneginf(cutoff).all():
        dense.masked_fill_(logits < cutoff[..., None], 0.0)
    return dense


BLOCK = 2**20
"""Numbers worked on at a time by `log_sum_exp`: what it writes stays in the cache and is never large."""


def log_sum_exp(
    logits: Float[Tensor, "N R"],
    scale: float,
    peak: Float[Tensor, " N"],
    cutoff: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """log Σ exp(scale · logit) over the logits at or above the cutoff, float64; `peak` is each row's largest logit.

    Summed by chunks of fixed borders: what comes out does not depend on the rows around, and a chunk's sum is short
    enough for float32.
    """
    step = max(2, BLOCK // max(1, logits.shape[-1]))
    totals = []
    for rows, top, edge in zip(
        logits.split(step), peak.split(step), (peak if cutoff is None else cutoff).split(step), strict=True
    ):
        dense = rows - top[:, None]
        if scale != 1.0:
            dense.mul_(scale)
        dense.exp_()
        if cutoff is not None:
            dense.masked_fill_(rows < edge[:, None], 0.0)
        totals.append(chunk_sums(dense).double().sum(-1))
    return scale * peak.double() + torch.cat(totals).log()


def overlap(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """The chance that one token drawn from q is kept: the mass that p and q share, 1 − TV(p, q)."""
    return p.minimum(q).sum(-1)


def total_variation(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """The largest difference between p and q over all events: half of Σ |p − q|."""
    return (p - q).abs().sum(-1) / 2


def residual(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """The law of the token that takes a rejected one's place: norm(max(0, p − q)).

    Why it makes the output exact. A token x drawn from q is kept with probability min(1, p(x)/q(x)), so x leaves as a
    kept token with probability min(q(x), p(x)). Point by point,

        min(q, p) + max(0, p − q) = p,

    so max(0, p − q) is just what is missing. Its mass is Σ max(0, p − q) = 1 − Σ min(p, q), the chance that the
    token was rejected: drawing from norm(max(0, p − q)) after a rejection delivers exactly the missing part.

    Where p = q nothing is missing and nothing is ever rejected; p is returned there, and never NaN.
    """
    return normalise((p - q).clamp_min(0), p)


def normalise(weights: Float[Tensor, "*B V"], otherwise: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """weights / their sum; `otherwise` in the rows that have no mass."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass.where(mass > 0, 1.0), otherwise)


__all__ = ["CHUNK", "Law", "Vocab", "overlap", "residual", "total_variation"]
