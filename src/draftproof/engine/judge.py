"""What becomes of a scored draft, and the round's one wait for it: by kernels where they run, else by laws and a rule.

Both give the same verdict for the same noise. Kernels decide from the raw scores and need no law; the reference is for
the host, for trees, for rules and laws of others, and for rounds in which something is no law. Log-probabilities are
always the laws' own, which are then written out beside the kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core import host
from draftproof.core.dense import law_of
from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.types import PAD, Draft, History, Verdict
from draftproof.engine.clock import Clock
from draftproof.engine.grammar import masks
from draftproof.engine.request import Session
from draftproof.models import Forward
from draftproof.verify import Verifier, fused
from draftproof.verify.shape import check_parents, misplaced


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft and the target's pass over it. `top`: how many of the likeliest tokens the drafter is to be shown."""

    sessions: Sequence[Session]
    draft: Draft
    forward: Forward
    noise: Noise
    top: int


@dataclass(frozen=True, slots=True)
class Told:
    """A verdict on the host, a line a row. `sound` tokens were drawn from laws; behind them the scores are none.

    `top`, where it was asked for and the scores lie elsewhere: the likeliest tokens at each emitted token's position.
    """

    tokens: list[list[int]]
    drafted: list[int]
    sound: list[int]
    logprobs: list[list[float]] | None
    top: list[list[list[int]]] | None
    nodes: Int[Tensor, "B J"]
    path: Int[Tensor, "B K"] | None


Laws = Callable[[Sequence[Session], Forward, Draft], Law]
"""What plain decoding would draw from at every scored position."""


def warped(sessions: Sequence[Session], forward: Forward, draft: Draft) -> Law:
    """The target's scores under each row's own sampling and grammar."""
    return _warped(sessions, forward, draft, masks(sessions, draft, forward.logits.shape[-1]))


def _warped(sessions: Sequence[Session], forward: Forward, draft: Draft, allowed: Bool[Tensor, "B J V"] | None) -> Law:
    samplings = [s.sampling for s in sessions]
    return law_of(forward.logits, samplings, _history(sessions), draft=draft, allowed=allowed)


def judge(scored: Scored, laws: Laws, verify: Verifier, clock: Clock) -> Told:
    """Decide the round."""
    told = _by_kernels(scored, verify, clock) if laws is warped else None
    return _by_reference(scored, laws, verify, clock) if told is None else told


def _by_kernels(scored: Scored, verify: Verifier, clock: Clock) -> Told | None:
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
            scored.noise,
            verify,
            history=_history(sessions),
            allowed=allowed,
        )
    with clock("commit"):
        verdict = Verdict(rows.tokens, rows.accepted)
        sound = (rows.accepted + 1).masked_fill(rows.faults != 0, PAD)
        log_p = None
        if _wants_log_probs(sessions):
            log_p = _log_probs(_warped(sessions, scored.forward, draft, allowed), verdict)
        told = _tell(scored, verdict, sound, log_p)
    return None if PAD in told.sound else told


def _by_reference(scored: Scored, laws: Laws, verify: Verifier, clock: Clock) -> Told:
    with clock("warp"):
        p, broken = _mended(laws(scored.sessions, scored.forward, scored.draft))
    with clock("verify"):
        verdict = verify(p, scored.draft, scored.noise)
    with clock("commit"):
        log_p = _log_probs(p, verdict) if _wants_log_probs(scored.sessions) else None
        sound = _sound(broken, verdict)
        if scored.draft.parents is not None and not host.is_host(sound.device):
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
    scored: Scored, verdict: Verdict, sound: Int[Tensor, " B"], log_p: Float[Tensor, "B J"] | None = None
) -> Told:
    """All that the host has to know, in one tensor and one wait."""
    nodes = _nodes(verdict)
    B, J = nodes.shape
    parts = [verdict.tokens, scored.draft.lengths[:, None], sound[:, None]]
    if log_p is not None:
        parts.append(log_p.double().view(torch.long))
    elsewhere = scored.top and not host.is_host(nodes.device)
    if elsewhere:
        top = scored.forward.logits.topk(scored.top).indices
        parts.append(top.gather(1, nodes[..., None].expand(B, J, scored.top)).flatten(1))
    numbers = host.Fetch(torch.cat(parts, 1)).read()
    rest = np.ascontiguousarray(numbers[:, J + 2 :])
    return Told(
        numbers[:, :J].tolist(),
        numbers[:, J].tolist(),
        numbers[:, J + 1].tolist(),
        None if log_p is None else rest[:, :J].copy().view(np.float64).tolist(),
        rest[:, -J * scored.top :].reshape(B, J, scored.top).tolist() if elsewhere else None,
        nodes,
        verdict.path,
    )


def _mended(p: Law) -> tuple[Law, Bool[Tensor, "B J"]]:
    """The laws, and where there is none: NaN among the scores, or a grammar that allows nothing.

    A draft may lead there though the text never does. So the verifier is given a point mass in its place, by which
    all that comes before keeps its law, and a request fails only if it gets there, as in plain decoding.
    """
    broken = p.lse.isnan()
    if host.is_host(broken.device) and not bool(broken.any()):  # elsewhere looking would be waiting
        return p, broken
    return replace(p, lse=p.lse.masked_fill(broken, 0.0), point=p.point.masked_fill(broken, 0), plain=False), broken


def _sound(broken: Bool[Tensor, "B J"], verdict: Verdict) -> Int[Tensor, " B"]:
    """How many tokens of each row were drawn from laws: all, or those before the first position that had none."""
    drawn = (verdict.tokens != PAD) & ~broken.gather(1, _nodes(verdict))
    return drawn.long().cumprod(1).sum(1)


def _nodes(verdict: Verdict) -> Int[Tensor, "B J"]:
    """The scored position behind which each emitted token stands."""
    B, J = verdict.tokens.shape
    if verdict.path is None:
        return torch.arange(J, device=verdict.tokens.device).expand(B, J)
    return torch.nn.functional.pad(verdict.path.clamp_min(PAD) + 1, (1, 0))


def _log_probs(p: Law, verdict: Verdict) -> Float[Tensor, "B J"]:
    nodes = _nodes(verdict)
    B, J = nodes.shape
    rows = torch.arange(B, device=nodes.device)[:, None].expand(B, J)
    return p.at(rows.flatten(), nodes.flatten()).log_prob(verdict.tokens.flatten()).view(B, J)
