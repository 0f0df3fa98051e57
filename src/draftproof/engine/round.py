"""One round: propose, score, warp, verify, keep, extend. The whole method is `advance`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a round is made of. `shared`: the drafter is to draw with the target's own noise, as `coupled` wants."""

    model: Model
    drafter: Drafter
    verify: Verifier
    asks: Asks
    shared: bool


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a round gave one row: its tokens, and what to tell of them. `fault` is set where its scores were no law."""

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
        p = _law(sessions, forward, draft)
    with clock("verify"):
        verdict = parts.verify(p, draft, Noise(noise.seeds, noise.starts))
    with clock("commit"):
        cache.keep(verdict.accepted + 1, verdict.path)
        return _emitted(sessions, p, draft, verdict, forward, parts.asks)


def _noise(sessions: Sequence[Session], device: torch.device, shared: bool) -> Noise:
    seeds = torch.tensor([s.sampling.seed for s in sessions], dtype=torch.long)
    starts = torch.tensor([len(s.tokens) for s in sessions], dtype=torch.long)
    return Noise(seeds.to(device), starts.to(device), shared)


def _scored(sessions: Sequence[Session], draft: Draft) -> Int[Tensor, "B J"]:
    """The last token of each row, which the cache has not seen yet, and the draft behind it."""
    last = torch.tensor([[s.tokens[-1]] for s in sessions], device=draft.tokens.device)
    return torch.cat([last, draft.tokens.clamp_min(0)], 1)


def _law(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Law:
    samplings = [s.sampling for s in sessions]
    history = [s.history for s in sessions] if any(s.penalises for s in samplings) else None
    allowed = masks(sessions, draft, forward.logits.shape[-1])
    return warp(forward.logits, samplings, history, draft, allowed)


def _emitted(
    sessions: Sequence[Session], p: Law, draft: Draft, verdict: Verdict, forward: Forward, asks: Asks
) -> list[Emitted]:
    """The verdict, row by row, on the host: the round's one wait for the device."""
    said, lengths = verdict.tokens.tolist(), draft.lengths.tolist()
    fault = _faults(p, draft).tolist()
    nodes = _nodes(verdict)
    log_p = _log_probs(p, verdict, nodes).tolist() if any(s.request.logprobs for s in sessions) else None
    rows = []
    for b, session in enumerate(sessions):
        tokens = [token for token in said[b] if token != PAD]
        kept = len(tokens)
        rows.append(
            Emitted(
                tokens,
                lengths[b],
                kept - 1,
                log_p[b][:kept] if log_p is not None and session.request.logprobs else [],
                _shown(forward, asks, b, nodes[b, :kept], len(session.tokens) + kept - 1),
                fault[b],
            )
        )
    return rows


def _faults(p: Law, draft: Draft) -> Tensor:
    """Rows with a scored position that is no law: NaN among its logits, or nothing allowed."""
    within = torch.arange(p.lse.shape[1], device=p.lse.device) <= draft.lengths[:, None]
    return (p.lse.isnan() & within).any(1)


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
