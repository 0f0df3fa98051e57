"""One round: propose, score, judge, keep, extend. The whole method is `advance`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.core import host
from draftproof.core.noise import Noise
from draftproof.core.types import PAD
from draftproof.drafters import Asks, Drafter, Shown
from draftproof.engine.clock import Clock
from draftproof.engine.judge import Laws, Scored, Told, judge, warped
from draftproof.engine.request import Session
from draftproof.models import Cache, Forward, Model
from draftproof.verify import Verifier


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
    noise, last = _opening(sessions, parts)
    with clock("draft"):
        draft = parts.drafter.propose(sessions, k, noise)
    with clock("score"):
        tokens = torch.cat([last, draft.tokens.clamp_min(0)], 1)
        forward = parts.model(tokens, cache, parents=draft.parents, layers=parts.asks.layers)
    scored = Scored(sessions, draft, forward, Noise(noise.seeds, noise.starts), parts.asks.top)
    told = judge(scored, parts.laws, parts.verify, clock)
    with clock("commit"):
        cache.keep(torch.tensor([_emitted(said) for said in told.tokens], dtype=torch.long), told.path)
        return [_row(b, session, told, forward, parts.asks) for b, session in enumerate(sessions)]


def _opening(sessions: Sequence[Session], parts: Parts) -> tuple[Noise, Int[Tensor, "B 1"]]:
    """What the round starts from, sent in one go: its noise, and the last token of each row, which the cache has not
    seen yet."""
    numbers = [[s.sampling.seed for s in sessions], [len(s.tokens) for s in sessions], [s.tokens[-1] for s in sessions]]
    seeds, starts, last = host.sent(numbers, parts.model.device)
    return Noise(seeds, starts, parts.shared), last[:, None]


def _row(b: int, session: Session, told: Told, forward: Forward, asks: Asks) -> Emitted:
    emitted, kept = _emitted(told.tokens[b]), told.sound[b]
    asked = told.logprobs is not None and session.request.logprobs
    return Emitted(
        told.tokens[b][:kept],
        told.drafted[b],
        emitted - 1,
        told.logprobs[b][:kept] if told.logprobs is not None and asked else [],
        _shown(forward, asks, told, b, kept, len(session.tokens) + kept - 1),
        kept < emitted,
    )


def _emitted(said: list[int]) -> int:
    return len(said) - said.count(PAD)


def _shown(forward: Forward, asks: Asks, told: Told, b: int, kept: int, stop: int) -> Shown | None:
    """What the drafter asked to see of the positions that were kept."""
    if not asks.top and not asks.layers:
        return None
    nodes = told.nodes[b, :kept]
    top = None
    if told.top is not None:
        top = torch.tensor(told.top[b][:kept], dtype=torch.long).view(kept, asks.top)
    elif asks.top:
        top = forward.logits[b, nodes].topk(asks.top).indices
    return Shown(stop, top, tuple(states[b, nodes] for states in forward.hidden))
