"""One speculative round: propose, score, decide, keep. The whole method is `advance`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, is_cpu, to_device
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.tree import misplaced
from draftproof.core.types import PAD, ROOT, Draft, Verdict
from draftproof.drafters.interface import Context, Drafter, TargetFeatures, TargetOutputs, features_of
from draftproof.engine.grammar import masks
from draftproof.engine.request import (
    Session,
)
from draftproof.models.interface import Cache, Forward, Model
from draftproof.rules import RULES, Verifier, resolve
from draftproof.rules.api import Decision, Scored, decide, positions_of
from draftproof.rules.checks import BAD_TARGET, describe_draft_fault

TargetDistributions = Callable[[Sequence[Session], Forward, Draft], Distribution]
"""Makes what plain decoding would draw from at every scored position."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a round: model, drafter, rule and options.

    rule     by name where it is one of ours: kernels serve names, a function is called as it is
    shared   whether the drafter draws with the target's own random numbers, as `coupled` wants
    targets  makes the target's distributions inside another host, by its processors; None: by each row's sampling
    """

    model: Model
    drafter: Drafter
    rule: str | Verifier
    features: TargetFeatures
    shared: bool
    targets: TargetDistributions | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """The result of a round for one row. `fault` says why the row cannot go on; None where it can."""

    tokens: list[int]
    drafted: int
    accepted: int
    logprobs: list[float]
    target_outputs: TargetOutputs | None
    fault: str | None
    deviation: float | None = None
    """Under a lossy rule: the largest total variation over the row's draft positions."""


def advance(sessions: Sequence[Session], k: Sequence[int], cache: Cache, parts: Parts, clock: "Clock") -> list[Emitted]:
    """Run one round for all rows."""
    rng, last = _start(sessions, parts)
    with clock("draft"):
        draft = proposed(parts.drafter, sessions, k, rng)
    with clock("score"):
        tokens, parents = _scorable(draft, parts.model.vocab_size)
        forward = parts.model(torch.cat([last, tokens], 1), cache, parents=parents, layers=parts.features.layers)
    result = _decided(sessions, draft, forward, Philox(rng.seeds, rng.starts), parts, clock)
    with clock("commit"):
        cache.keep(torch.tensor([_count(row) for row in result.tokens], dtype=torch.long), result.path)
        return [_emitted(b, session, result, forward, parts) for b, session in enumerate(sessions)]


def _start(sessions: Sequence[Session], parts: Parts) -> tuple[Philox, Int[Tensor, "B 1"]]:
    """Copy to the device what a round starts from: the key of its random numbers, and each row's last token.

    The cache does not hold that token yet.
    """
    numbers = [[s.sampling.seed for s in sessions], [len(s.tokens) for s in sessions], [s.tokens[-1] for s in sessions]]
    seeds, starts, last = to_device(numbers, parts.model.device)
    return Philox(seeds, starts, parts.shared), last[:, None]


# ---------------------------------------------------------------------------------------------------------- the draft


class NoDrafter:
    """Plain decoding as a drafter: it never guesses. Under `coupled` every token is then the target's own draw."""

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        B, device = len(contexts), rng.seeds.device
        return Draft(
            torch.empty((B, 0), dtype=torch.long, device=device), torch.zeros(B, dtype=torch.long, device=device)
        )


def proposed(drafter: Drafter, sessions: Sequence[Session], k: Sequence[int], rng: Philox) -> Draft:
    """Ask the drafter, and refuse by its name what is not a draft of these rows."""
    draft, name, B = drafter.propose(sessions, k, rng), type(drafter).__name__, len(sessions)
    if not isinstance(draft, Draft):
        raise TypeError(f"drafter {name} must return a Draft from propose(); got {type(draft).__name__}")
    for field_name, tensor, ndim in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        if tensor.is_floating_point() or tensor.ndim != ndim or len(tensor) != B:
            shape = f"[{B}, K]" if ndim == 2 else f"[{B}]"
            raise ValueError(
                f"drafter {name} must return integer {field_name} {shape}; got {tensor.dtype} {list(tensor.shape)}"
            )
    if is_cpu(draft.lengths.device):
        for b, (length, most) in enumerate(zip(draft.lengths.tolist(), k, strict=True)):
            if length > most:
                raise ValueError(f"drafter {name} drafted {length} tokens for row {b}, which asked for at most {most}")
    return draft


def _scorable(draft: Draft, V: int) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B K"] | None]:
    """Return tokens and parents that a model can score, even of a faulty draft: verification reports its faults."""
    parents = draft.parents
    if parents is not None:
        parents = parents.masked_fill(misplaced(draft), ROOT)
    return draft.tokens.clamp(0, V - 1), parents


# ------------------------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A decision on the CPU, one entry a row.

    sound      emitted tokens that were drawn from distributions; after them the target's scores are not one
    faults     why a row cannot go on: its draft or its grammar; None where nothing is wrong
    top        the target's likeliest tokens at each emitted token's position, if a drafter asked, on a GPU
    deviation  under a lossy rule, the largest total variation over each row's draft positions
    """

    tokens: list[list[int]]
    drafted: list[int]
    sound: list[int]
    faults: list[str | None]
    logprobs: list[list[float]] | None
    top: list[list[list[int]]] | None
    nodes: Int[Tensor, "B J"]
    path: Int[Tensor, "B K"] | None
    deviation: list[float] | None


def _decided(
    sessions: Sequence[Session], draft: Draft, forward: Forward, rng: Philox, parts: Parts, clock: "Clock"
) -> RoundResult:
    """Verify the scored draft and read the decision."""
    targets, allowed = parts.targets, None
    faults: dict[int, str] = {}
    if targets is None and any(s.request.allowed is not None for s in sessions):
        allowed, faults = masks(sessions, draft, forward.logits.shape[-1])
    scored = Scored(
        forward.logits,
        [s.sampling for s in sessions],
        draft,
        [s.history for s in sessions] if any(s.sampling.penalises for s in sessions) else None,
        allowed,
        target=None if targets is None else partial(targets, sessions, forward),
    )
    read = partial(_read, scored, type(parts.drafter).__name__, parts.features.top, _wants_logprobs(sessions))
    result = decide(scored, lambda: rng, parts.rule, read, timer=clock)
    if faults:
        result = replace(result, faults=[faults.get(b, fault) for b, fault in enumerate(result.faults)])
    return result


def _wants_logprobs(sessions: Sequence[Session]) -> bool:
    return any(s.request.logprobs for s in sessions)


def _read(scored: Scored, drafter: str, top: int, logprobs: bool, decision: Decision) -> RoundResult | None:
    """Copy all that the CPU needs of a decision in one tensor: the round's one synchronisation.

    None where the kernels found a fault: only the reference can tell what it is.
    """
    verdict, draft = decision.verdict, scored.draft
    nodes = positions_of(verdict)
    B, J = nodes.shape
    parts = [verdict.tokens, draft.lengths[:, None], decision.sound[:, None], decision.faults[:, None].long()]
    if logprobs:
        p = scored.distribution(decision.draft) if decision.p is None else decision.p
        parts.append(_log_probs(p, verdict.tokens, nodes).double().view(torch.long))
    on_gpu = top > 0 and not is_cpu(nodes.device)
    if on_gpu:
        likeliest = scored.logits.topk(top).indices
        parts.append(likeliest.gather(1, nodes[..., None].expand(B, J, top)).flatten(1))
    numbers = _fetched(parts)
    faults = numbers[:, J + 2].tolist()
    if decision.by_kernels and any(faults):
        return None
    rest = np.ascontiguousarray(numbers[:, J + 3 :])
    return RoundResult(
        numbers[:, :J].tolist(),
        numbers[:, J].tolist(),
        numbers[:, J + 1].tolist(),
        [_draft_fault(draft, drafter, b, bits, scored.logits.shape[-1]) for b, bits in enumerate(faults)],
        rest[:, :J].copy().view(np.float64).tolist() if logprobs else None,
        rest[:, -J * top :].reshape(B, J, top).tolist() if on_gpu else None,
        nodes,
        verdict.path,
        None if verdict.exact else _deviation(verdict),
    )


def _deviation(verdict: Verdict) -> list[float]:
    """Return the largest total variation over each row's draft positions; it synchronises."""
    measured = verdict.deviation
    if measured is None or measured.total_variation.shape[1] == 0:
        return [0.0] * len(verdict.accepted)
    return [float(value) for value in measured.total_variation.amax(1).tolist()]


def _fetched(parts: list[Int[Tensor, "B _"]]) -> npt.NDArray[np.int64]:
    """Copy these columns to the CPU side by side, in one synchronisation."""
    return AsyncCopy(torch.cat(parts, 1)).read()


def _draft_fault(draft: Draft, drafter: str, b: int, bits: int, V: int) -> str | None:
    if not bits & ~BAD_TARGET:
        return None
    return f"drafter {drafter} proposed {describe_draft_fault(draft, b, bits, V)}"


def _log_probs(p: Distribution, tokens: Int[Tensor, "B J"], nodes: Int[Tensor, "B J"]) -> Float[Tensor, "B J"]:
    """Return each emitted token's log-probability under the distribution it was drawn from."""
    B, J = nodes.shape
    rows = torch.arange(B, device=nodes.device)[:, None].expand(B, J)
    return p.at(rows.flatten(), nodes.flatten()).log_prob(tokens.flatten()).view(B, J)


# ----------------------------------------------------------------------------------------------------- what rows get


def _emitted(b: int, session: Session, result: RoundResult, forward: Forward, parts: Parts) -> Emitted:
    """Return what the round gave row b."""
    emitted, kept, fault = _count(result.tokens[b]), result.sound[b], result.faults[b]
    if fault is not None:
        return Emitted([], 0, 0, [], None, fault)
    if kept < emitted:
        at = len(session.tokens) + kept
        fault = (
            f"the scores after token {at} are not a distribution: the model gave NaN or infinity, or nothing is "
            "allowed there"
        )
    asked = result.logprobs is not None and session.request.logprobs
    return Emitted(
        result.tokens[b][:kept],
        result.drafted[b],
        emitted - 1,
        result.logprobs[b][:kept] if result.logprobs is not None and asked else [],
        _target_outputs(forward, parts.features, result, b, kept, len(session.tokens) + kept - 1),
        fault,
        None if result.deviation is None else result.deviation[b],
    )


def _count(tokens: list[int]) -> int:
    return len(tokens) - tokens.count(PAD)


def _target_outputs(
    forward: Forward, features: TargetFeatures, result: RoundResult, b: int, kept: int, stop: int
) -> TargetOutputs | None:
    """Return what the drafter asked to see of the positions that were kept."""
    if not features.top and not features.layers:
        return None
    nodes = result.nodes[b, :kept]
    top = None
    if result.top is not None:
        top = torch.tensor(result.top[b][:kept], dtype=torch.long).view(kept, features.top)
    elif features.top:
        top = forward.logits[b, nodes].topk(features.top).indices
    return TargetOutputs(stop, top, tuple(states[b, nodes] for states in forward.hidden))


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


def parts(
    model: Model, drafter: Drafter | None, rule: str | Verifier, targets: TargetDistributions | None = None
) -> Parts:
    """Collect the parts of a round. Without a drafter they do plain decoding, whatever the rule."""
    coupled = resolve(rule) is RULES["coupled"]
    if drafter is None:
        return Parts(model, NoDrafter(), "coupled", features_of(NoDrafter()), shared=False, targets=targets)
    return Parts(model, drafter, rule, features_of(drafter), shared=coupled, targets=targets)
