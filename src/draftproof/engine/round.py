"""One round: propose, score, judge, keep, extend. The whole method is `advance`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, is_cpu, to_device
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import warp_without_sync
from draftproof.core.tree import check_parents, misplaced
from draftproof.core.types import PAD, Draft, History, Verdict
from draftproof.drafters.interface import Context, Drafter, TargetFeatures, TargetOutputs
from draftproof.engine.grammar import masks
from draftproof.engine.request import Session
from draftproof.models.interface import Cache, Forward, Model
from draftproof.rules import Verifier
from draftproof.rules import api as fused


@dataclass(slots=True)
class Clock:
    """Seconds by stage since it was made."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft and the target's pass over it. `top`: how many of the likeliest tokens the drafter is to be shown."""

    sessions: Sequence[Session]
    draft: Draft
    forward: Forward
    rng: Philox
    top: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A verdict on the host, a line a row. `sound` tokens were drawn from distributions; behind them the scores are none.

    `top`, where it was asked for and the scores lie elsewhere: the likeliest tokens at each emitted token's position.
    """

    tokens: list[list[int]]
    drafted: list[int]
    sound: list[int]
    logprobs: list[list[float]] | None
    top: list[list[list[int]]] | None
    nodes: Int[Tensor, "B J"]
    path: Int[Tensor, "B K"] | None


TargetDistributions = Callable[[Sequence[Session], Forward, Draft], Distribution]
"""What plain decoding would draw from at every scored position."""


def warped_targets(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
    """The target's scores under each row's own sampling and grammar."""
    return _warped_targets(sessions, forward, draft, masks(sessions, draft, forward.logits.shape[-1]))


def _warped_targets(
    sessions: Sequence[Session], forward: Forward, draft: Draft, allowed: Bool[Tensor, "B J V"] | None
) -> Distribution:
    samplings = [s.sampling for s in sessions]
    return warp_without_sync(forward.logits, samplings, _history(sessions), draft=draft, allowed=allowed)


def decide_round(scored: ScoredDraft, dists: TargetDistributions, verify: Verifier, clock: Clock) -> RoundResult:
    """Decide the round."""
    told = _by_kernels(scored, verify, clock) if dists is warped_targets else None
    return _by_reference(scored, dists, verify, clock) if told is None else told


def _by_kernels(scored: ScoredDraft, verify: Verifier, clock: Clock) -> RoundResult | None:
    """None where kernels do not serve the round, or find in it what only the reference can tell apart."""
    sessions, draft, logits = scored.sessions, scored.draft, scored.forward.logits
    if not fused.serves(logits, draft, verify):
        return None
    with clock("verify"):
        allowed = masks(sessions, draft, logits.shape[-1])
        rows = fused.verify_draft(
            logits,
            [s.sampling for s in sessions],
            draft,
            scored.rng,
            verify,
            history=_history(sessions),
            allowed=allowed,
        )
    with clock("commit"):
        verdict = Verdict(rows.tokens, rows.accepted)
        sound = (rows.accepted + 1).masked_fill(rows.faults != 0, PAD)
        log_p = None
        if _wants_log_probs(sessions):
            log_p = _log_probs(_warped_targets(sessions, scored.forward, draft, allowed), verdict)
        told = _tell(scored, verdict, sound, log_p)
    return None if PAD in told.sound else told


def _by_reference(scored: ScoredDraft, dists: TargetDistributions, verify: Verifier, clock: Clock) -> RoundResult:
    with clock("warp"):
        p, broken = _mended(dists(scored.sessions, scored.forward, scored.draft))
    with clock("verify"):
        verdict = verify(p, scored.draft, scored.rng)
    with clock("commit"):
        log_p = _log_probs(p, verdict) if _wants_log_probs(scored.sessions) else None
        sound = _sound(broken, verdict)
        if scored.draft.parents is not None and not is_cpu(sound.device):
            sound = sound.masked_fill(misplaced(scored.draft).any(1), PAD)
        told = _tell(scored, verdict, sound, log_p)
    if PAD in told.sound:  # the rule could not look at the parents, which would have been to wait
        check_parents(scored.draft)
    return told


def _wants_log_probs(sessions: Sequence[Session]) -> bool:
    return any(s.request.logprobs for s in sessions)


def _history(sessions: Sequence[Session]) -> list[History] | None:
    return [s.history for s in sessions] if any(s.sampling.penalises for s in sessions) else None


def _tell(
    scored: ScoredDraft, verdict: Verdict, sound: Int[Tensor, " B"], log_p: Float[Tensor, "B J"] | None = None
) -> RoundResult:
    """All that the host has to know, in one tensor and one wait."""
    nodes = _nodes(verdict)
    B, J = nodes.shape
    parts = [verdict.tokens, scored.draft.lengths[:, None], sound[:, None]]
    if log_p is not None:
        parts.append(log_p.double().view(torch.long))
    elsewhere = scored.top and not is_cpu(nodes.device)
    if elsewhere:
        top = scored.forward.logits.topk(scored.top).indices
        parts.append(top.gather(1, nodes[..., None].expand(B, J, scored.top)).flatten(1))
    numbers = AsyncCopy(torch.cat(parts, 1)).read()
    rest = np.ascontiguousarray(numbers[:, J + 2 :])
    return RoundResult(
        numbers[:, :J].tolist(),
        numbers[:, J].tolist(),
        numbers[:, J + 1].tolist(),
        None if log_p is None else rest[:, :J].copy().view(np.float64).tolist(),
        rest[:, -J * scored.top :].reshape(B, J, scored.top).tolist() if elsewhere else None,
        nodes,
        verdict.path,
    )


def _mended(p: Distribution) -> tuple[Distribution, Bool[Tensor, "B J"]]:
    """The distributions, and where there is none: NaN among the scores, or a grammar that allows nothing.

    A draft may lead there though the text never does. So the verifier is given a point mass in its place, by which
    all that comes before keeps its distribution, and a request fails only if it gets there, as in plain decoding.
    """
    broken = p.lse.isnan()
    if is_cpu(broken.device) and not bool(broken.any()):  # elsewhere looking would be waiting
        return p, broken
    return replace(p, lse=p.lse.masked_fill(broken, 0.0), point=p.point.masked_fill(broken, 0), plain=False), broken


def _sound(broken: Bool[Tensor, "B J"], verdict: Verdict) -> Int[Tensor, " B"]:
    """How many tokens of each row were drawn from distributions: all, or those before the first position that had none."""
    drawn = (verdict.tokens != PAD) & ~broken.gather(1, _nodes(verdict))
    return drawn.long().cumprod(1).sum(1)


def _nodes(verdict: Verdict) -> Int[Tensor, "B J"]:
    """The scored position behind which each emitted token stands."""
    B, J = verdict.tokens.shape
    if verdict.path is None:
        return torch.arange(J, device=verdict.tokens.device).expand(B, J)
    return torch.nn.functional.pad(verdict.path.clamp_min(PAD) + 1, (1, 0))


def _log_probs(p: Distribution, verdict: Verdict) -> Float[Tensor, "B J"]:
    nodes = _nodes(verdict)
    B, J = nodes.shape
    rows = torch.arange(B, device=nodes.device)[:, None].expand(B, J)
    return p.at(rows.flatten(), nodes.flatten()).log_prob(verdict.tokens.flatten()).view(B, J)


class NoDrafter:
    """Never guesses. Under `coupled` that is plain decoding: every token is the target's own race."""

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        B, device = len(contexts), rng.seeds.device
        return Draft(
            torch.empty((B, 0), dtype=torch.long, device=device), torch.zeros(B, dtype=torch.long, device=device)
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What a round is made of. `shared`: the drafter is to draw with the target's own noise, as `coupled` wants.
    `distributions` makes the target's distributions of its scores; inside another host they are the host's."""

    model: Model
    drafter: Drafter
    verify: Verifier
    features: TargetFeatures
    shared: bool
    dists: TargetDistributions = warped_targets


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a round gave one row: its tokens, and what to tell of them. `fault`: behind them the scores are no distribution."""

    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: list[float]
    shown: TargetOutputs | None
    fault: bool


def advance(sessions: Sequence[Session], k: Sequence[int], cache: Cache, parts: Parts, clock: Clock) -> list[Emitted]:
    """Run one round for all rows."""
    rng, last = _opening(sessions, parts)
    with clock("draft"):
        draft = parts.drafter.propose(sessions, k, rng)
    with clock("score"):
        tokens = torch.cat([last, draft.tokens.clamp_min(0)], 1)
        forward = parts.model(tokens, cache, parents=draft.parents, layers=parts.features.layers)
    scored = ScoredDraft(sessions, draft, forward, Philox(rng.seeds, rng.starts), parts.features.top)
    told = decide_round(scored, parts.dists, parts.verify, clock)
    with clock("commit"):
        cache.keep(torch.tensor([_emitted(said) for said in told.tokens], dtype=torch.long), told.path)
        return [_row(b, session, told, forward, parts.features) for b, session in enumerate(sessions)]


def _opening(sessions: Sequence[Session], parts: Parts) -> tuple[Philox, Int[Tensor, "B 1"]]:
    """What the round starts from, sent in one go: its noise, and the last token of each row, which the cache has not
    seen yet."""
    numbers = [[s.sampling.seed for s in sessions], [len(s.tokens) for s in sessions], [s.tokens[-1] for s in sessions]]
    seeds, starts, last = to_device(numbers, parts.model.device)
    return Philox(seeds, starts, parts.shared), last[:, None]


def _row(b: int, session: Session, told: RoundResult, forward: Forward, features: TargetFeatures) -> Emitted:
    emitted, kept = _emitted(told.tokens[b]), told.sound[b]
    asked = told.logprobs is not None and session.request.logprobs
    return Emitted(
        told.tokens[b][:kept],
        told.drafted[b],
        emitted - 1,
        told.logprobs[b][:kept] if told.logprobs is not None and asked else [],
        _shown(forward, features, told, b, kept, len(session.tokens) + kept - 1),
        kept < emitted,
    )


def _emitted(said: list[int]) -> int:
    return len(said) - said.count(PAD)


def _shown(
    forward: Forward, features: TargetFeatures, told: RoundResult, b: int, kept: int, stop: int
) -> TargetOutputs | None:
    """What the drafter asked to see of the positions that were kept."""
    if not features.top and not features.layers:
        return None
    nodes = told.nodes[b, :kept]
    top = None
    if told.top is not None:
        top = torch.tensor(told.top[b][:kept], dtype=torch.long).view(kept, features.top)
    elif features.top:
        top = forward.logits[b, nodes].topk(features.top).indices
    return TargetOutputs(stop, top, tuple(states[b, nodes] for states in forward.hidden))
