"""One round: propose, score, warp, verify, keep, extend. The whole method is `advance`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.sampling import warp
from draftproof.core.types import PAD, Draft, Verdict
from draftproof.drafters import Asks, Drafter, Shown
from draftproof.engine.clock import Clock
from draftproof.engine.grammar import masks
from draftproof.engine.request import Session
from draftproof.models import Cache, Forward, Model
from draftproof.verify import Verifier

Laws = Callable[[Sequence[Session], Forward, Draft], Law]
"""What plain decoding would draw from at every scored position."""


def warped(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Law:
    """The target's scores under each row's own sampling and grammar."""
    samplings = [s.sampling for s in sessions]
    history = [s.history for s in sessions] if any(s.penalises for s in samplings) else None
    allowed = masks(sessions, draft, forward.logits.shape[-1])
    return warp(forward.logits, samplings, history, draft, allowed)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a round is made of. `shared`: the drafter is to draw with the target's own noise, as `coupled` wants.
    `laws` makes the target's laws of its scores; inside another host they are the host's."""

    model: Model
    drafter: Drafter
    verify: Verifier
    asks: Asks
    shared: bool
    laws: Laws = warped


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a round gave one row: its tokens, and what to tell of them. `fault`: behind them the scores are no law."""

    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: list[float]
    shown: Shown | None
    fault: bool


def advance(sessions: Sequence[Session], k: Sequence[int], cache: Cache, parts: Parts, clock: Clock) -> list[Emitted]:
    """Run one round for all rows."""
    noise = _noise(sessions, parts.model.device, parts.shared)
    with clock("draft"):
        draft = parts.drafter.propose(sessions, k, noise)
    with clock("score"):
        forward = parts.model(_scored(sessions, draft), cache, parents=draft.parents, layers=parts.asks.layers)
    with clock("warp"):
        p, broken = _mended(parts.laws(sessions, forward, draft))
    with clock("verify"):
        verdict = parts.verify(p, draft, Noise(noise.seeds, noise.starts))
    with clock("commit"):
        cache.keep(verdict.accepted + 1, verdict.path)
        return _emitted(sessions, Scored(forward, p, broken), draft, verdict, parts.asks)


def _noise(sessions: Sequence[Session], device: torch.device, shared: bool) -> Noise:
    seeds = torch.tensor([s.sampling.seed for s in sessions], dtype=torch.long)
    starts = torch.tensor([len(s.tokens) for s in sessions], dtype=torch.long)
    return Noise(seeds.to(device), starts.to(device), shared)


def _scored(sessions: Sequence[Session], draft: Draft) -> Int[Tensor, "B J"]:
    """The last token of each row, which the cache has not seen yet, and the draft behind it."""
    last = torch.tensor([[s.tokens[-1]] for s in sessions], device=draft.tokens.device)
    return torch.cat([last, draft.tokens.clamp_min(0)], 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """What the target's pass came to."""

    forward: Forward
    p: Law
    broken: Bool[Tensor, "B J"]


def _mended(p: Law) -> tuple[Law, Bool[Tensor, "B J"]]:
    """The laws, and where there is none: NaN among the scores, or a grammar that allows nothing.

    A draft may lead there though the text never does. So the verifier is given a point mass in its place, by which
    all that comes before keeps its law, and a request fails only if it gets there, as in plain decoding.
    """
    broken = p.lse.isnan()
    if broken.device.type == "cpu" and not bool(broken.any()):  # elsewhere looking would be waiting
        return p, broken
    return replace(p, lse=p.lse.masked_fill(broken, 0.0), point=p.point.masked_fill(broken, 0), plain=False), broken


def _emitted(sessions: Sequence[Session], scored: Scored, draft: Draft, verdict: Verdict, asks: Asks) -> list[Emitted]:
    """The verdict, row by row, on the host: the round's one wait for the device."""
    said, lengths = verdict.tokens.tolist(), draft.lengths.tolist()
    nodes = _nodes(verdict)
    sound = _sound(scored.broken, verdict, nodes).tolist()
    log_p = _log_probs(scored.p, verdict, nodes).tolist() if any(s.request.logprobs for s in sessions) else None
    rows = []
    for b, session in enumerate(sessions):
        emitted = len(said[b]) - said[b].count(PAD)
        kept = sound[b]
        rows.append(
            Emitted(
                said[b][:kept],
                lengths[b],
                emitted - 1,
                log_p[b][:kept] if log_p is not None and session.request.logprobs else [],
                _shown(scored.forward, asks, b, nodes[b, :kept], len(session.tokens) + kept - 1),
                kept < emitted,
            )
        )
    return rows


def _sound(broken: Bool[Tensor, "B J"], verdict: Verdict, nodes: Int[Tensor, "B J"]) -> Int[Tensor, " B"]:
    """How many tokens of each row were drawn from laws: all, or those before the first position that had none."""
    drawn = (verdict.tokens != PAD) & ~broken.gather(1, nodes)
    return drawn.long().cumprod(1).sum(1)


def _nodes(verdict: Verdict) -> Int[Tensor, "B J"]:
    """The scored position behind which each emitted token stands."""
    B, J = verdict.tokens.shape
    if verdict.path is None:
        return torch.arange(J, device=verdict.tokens.device).expand(B, J)
    return torch.nn.functional.pad(verdict.path.clamp_min(PAD) + 1, (1, 0))


def _log_probs(p: Law, verdict: Verdict, nodes: Int[Tensor, "B J"]) -> Float[Tensor, "B J"]:
    B, J = nodes.shape
    rows = torch.arange(B, device=nodes.device)[:, None].expand(B, J)
    return p.at(rows.flatten(), nodes.flatten()).log_prob(verdict.tokens.flatten()).view(B, J)


def _shown(forward: Forward, asks: Asks, b: int, nodes: Int[Tensor, " T"], stop: int) -> Shown | None:
    """What the drafter asked to see of the positions that were kept."""
    if not asks.top and not asks.layers:
        return None
    top = forward.logits[b, nodes].topk(asks.top).indices if asks.top else None
    return Shown(stop, top, tuple(states[b, nodes] for states in forward.hidden))
