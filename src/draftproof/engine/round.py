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
from draftproof.engine.request import Session, TokenLogprobs
from draftproof.models.interface import Forward, Model
from draftproof.models.rows import Block, Group, Read, Reading, Rows
from draftproof.rules import RULES, Verifier, resolve
from draftproof.rules.api import Decision, Scored, decide, positions_of
from draftproof.rules.checks import BAD_TARGET, describe_draft_fault

TargetDistributions = Callable[[Sequence[Session], Forward, Draft], Distribution]
"""Makes what plain decoding would draw from at every scored position."""

StatesByRow = list[tuple[Float[Tensor, "J H"], ...]]
"""The target's states at the scored positions of each row, one tensor for each layer that a drafter reads."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a round: model, drafter, rule and options.

    rule     of rows that ask for none; by name where it is one of ours: kernels serve names
    targets  makes the target's distributions inside another host, by its processors; None: by each row's sampling
    """

    model: Model
    drafter: Drafter
    rule: str | Verifier
    features: TargetFeatures
    targets: TargetDistributions | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """The result of a round for one row. `fault` says why the row cannot go on; None where it can."""

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    logprobs: list["TokenLogprobs"] = field(default_factory=list)
    target_outputs: TargetOutputs | None = None
    fault: str | None = None
    deviation: float | None = None
    """Under a lossy rule: the largest total variation over the row's draft positions."""
    cause: Exception | None = None
    """What a caller's own code raised, if that is the fault."""


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A round whose results the host knows: its rows, and what it emitted for each.

    asked       draft tokens asked for, by row
    drawn       draft tokens that were drawn, by row; more than a row has where all rows draw as many
    seconds     the time of each stage
    is_typical  whether its time says something about later rounds: nothing was recorded, and no prompt was read
    """

    sessions: list[Session]
    emitted: list[Emitted]
    asked: list[int]
    drawn: list[int]
    seconds: dict[str, float]
    is_typical: bool


def advance(
    sessions: Sequence[Session],
    k: Sequence[int],
    rows: Rows,
    parts: Parts,
    clock: "Clock",
    reading: Sequence[Reading] = (),
) -> tuple[list[Emitted], list[Read]]:
    """Run one round for all rows, and read parts of other rows' prompts in the same pass."""
    rng, last = _start(sessions, parts)
    with clock("draft"):
        teams = _drafts(sessions, k, parts, rng)
    with clock("score"):
        blocks = [_block(team, sessions, last, parts.model.vocab_size) for team in teams]
        scores = rows.score(blocks, layers=parts.features.layers, reading=reading)
    emitted = [Emitted([]) for _ in sessions]
    for team, groups in zip(teams, scores.groups, strict=True):
        for group in groups:
            part = team.part(group)
            members = [sessions[i] for i in part.index]
            try:
                result = _decided(members, part, group.forward, rng, parts, clock)
            except Exception as raised:  # a request may bring its own rule, or one that its draft is not for
                fault = f"its rule failed: {type(raised).__name__}: {raised}"
                for i in team.index:
                    emitted[i] = Emitted([], fault=fault, cause=raised)
                break
            with clock("commit"):
                rows.keep([s.id for s in members], [_count(row) for row in result.tokens], result.path)
                states = _states_by_row(group.forward, result)
                for b, i in enumerate(part.index):
                    emitted[i] = _emitted(b, sessions[i], result, group.forward, states, parts)
    for i, failure in _errors(teams):
        emitted[i] = Emitted([], fault=f"its drafter failed: {type(failure).__name__}: {failure}", cause=failure)
    return emitted, scores.read


def _start(sessions: Sequence[Session], parts: Parts) -> tuple[Philox, Int[Tensor, "B 1"]]:
    """Copy to the device what a round starts from: the key of its random numbers, and each row's last token.

    The cache does not hold that token yet.
    """
    numbers = [[s.sampling.seed for s in sessions], [len(s.tokens) for s in sessions], [s.tokens[-1] for s in sessions]]
    seeds, starts, last = to_device(numbers, parts.model.device)
    return Philox(seeds, starts), last[:, None]


# ---------------------------------------------------------------------------------------------------------- the draft


@dataclass(frozen=True, slots=True)
class Team:
    """Rows of a round that one rule verifies, and their draft.

    `index` says which of the round's rows they are, `errors` which others a drafter failed on.
    """

    index: list[int]
    rule: str | Verifier
    draft: Draft
    errors: dict[int, Exception] = field(default_factory=dict)

    def part(self, group: Group) -> "Team":
        """Return the team of a group's rows, whose drafts have one length."""
        K = group.forward.logits.shape[1] - 1
        is_whole = self.draft.tokens.shape == (len(group.members), K)
        if is_whole:
            return self
        draft, rows = self.draft, to_device(group.members, self.draft.tokens.device)
        return Team(
            [self.index[b] for b in group.members],
            self.rule,
            Draft(
                draft.tokens[rows, :K],
                draft.lengths[rows],
                None if draft.q is None or K == 0 else draft.q.rows(rows, K),
                None if draft.drawn is None or K == 0 else draft.drawn[rows, :K],
                None if draft.parents is None else draft.parents[rows, :K],
                draft.shared_rng,
            ),
        )


def _drafts(sessions: Sequence[Session], k: Sequence[int], parts: Parts, rng: Philox) -> list[Team]:
    """Propose a draft for every row, rule by rule: `coupled` needs drafts that are drawn with shared random numbers.

    A drafter sees all its rows in every call, so that it can follow them; rows of other rules ask for no tokens.
    """
    rules = [rule_of(session, parts) for session in sessions]
    drafting = [i for i, session in enumerate(sessions) if session.request.drafter]
    teams = []
    for rule in _distinct(rules):
        shared = resolve(rule) is RULES["coupled"]
        mine = [i for i in drafting if rules[i] == rule]
        if mine:
            wanted = [k[i] if rules[i] == rule else 0 for i in drafting]
            its_rng = _rows_of(replace(rng, shared=shared), drafting, len(sessions))
            draft, errors = _draft_or_errors(parts.drafter, [sessions[i] for i in drafting], wanted, its_rng)
            errors = {drafting[b]: error for b, error in errors.items()}
            sound = [i for i in drafting if i not in errors]
            every = Team(sound, rule, draft, {i: error for i, error in errors.items() if i in mine})
            teams.append(every if len(mine) == len(drafting) else _only(every, mine))
        plain = [i for i, each in enumerate(rules) if each == rule and not sessions[i].request.drafter]
        if plain:
            nothing = NoDrafter().propose(
                [sessions[i] for i in plain], [0] * len(plain), _rows_of(rng, plain, len(sessions))
            )
            teams.append(Team(plain, rule, nothing))
    return teams


def _distinct(rules: Sequence[str | Verifier]) -> list[str | Verifier]:
    """Return each rule once; a caller's rule need not be hashable."""
    found: list[str | Verifier] = []
    for rule in rules:
        if not any(rule is each or rule == each for each in found):
            found.append(rule)
    return found


def _only(team: Team, mine: list[int]) -> Team:
    """Return the rows of a team that are named, and its errors."""
    members = [b for b, i in enumerate(team.index) if i in mine]
    K = team.draft.tokens.shape[1]
    V = 0
    part = team.part(Group(members, Forward(torch.empty((len(members), K + 1, V)))))
    return replace(part, errors=team.errors)


def rule_of(session: Session, parts: Parts) -> str | Verifier:
    """Return a row's rule. A row without a drafter decodes as `coupled` does: each token by its position's numbers."""
    if not session.request.drafter:
        return "coupled"
    return parts.rule if session.request.rule is None else session.request.rule


def _rows_of(rng: Philox, index: list[int], rows: int) -> Philox:
    return rng if len(index) == rows else rng.take(to_device(index, rng.seeds.device))


def _draft_or_errors(
    drafter: Drafter, contexts: Sequence[Session], k: Sequence[int], rng: Philox
) -> tuple[Draft, dict[int, Exception]]:
    """Return a draft, or where the drafter raises, which rows it fails on and a draft for the others."""
    try:
        return proposed(drafter, contexts, k, rng), {}
    except Exception as raised:  # a caller's code may raise anything; the requests that it fails on end alone
        errors: dict[int, Exception] = dict.fromkeys(range(len(contexts)), raised)
    if len(contexts) > 1:
        for b, context in enumerate(contexts):
            try:
                proposed(drafter, [context], [k[b]], rng.take(to_device([b], rng.seeds.device)))
                del errors[b]
            except Exception as raised:
                errors[b] = raised
    sound = [b for b in range(len(contexts)) if b not in errors]
    if not sound:
        return NoDrafter().propose([], [], rng.take(to_device([], rng.seeds.device))), errors
    rest = rng.take(to_device(sound, rng.seeds.device))
    draft, more = _draft_or_errors(drafter, [contexts[b] for b in sound], [k[b] for b in sound], rest)
    return draft, errors | {sound[b]: error for b, error in more.items()}


def _errors(teams: Sequence[Team]) -> Iterator[tuple[int, Exception]]:
    for team in teams:
        yield from team.errors.items()


def _block(team: Team, sessions: Sequence[Session], last: Int[Tensor, "B 1"], V: int) -> Block:
    """Return what the target scores for a team: each row's last token, then its draft."""
    draft, parents = team.draft, team.draft.parents
    if parents is not None:
        parents = parents.masked_fill(misplaced(draft), ROOT)
    # A faulty draft is scored, too: verification reports its faults.
    first = last if len(team.index) == len(last) else last[to_device(team.index, last.device)]
    tokens = torch.cat([first, draft.tokens.clamp(0, V - 1)], 1)
    K, widths = draft.tokens.shape[1], None
    if is_cpu(draft.lengths.device):
        widths = [1 + (length if 0 <= length <= K else K) for length in draft.lengths.tolist()]
    return Block([sessions[i].id for i in team.index], tokens, widths, parents)


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
    logprobs: list[list[list[float]]] | None
    top: list[list[list[int]]] | None
    nodes: Int[Tensor, "B J"]
    path: Int[Tensor, "B K"] | None
    deviation: list[float] | None


def _decided(
    sessions: Sequence[Session], team: Team, forward: Forward, rng: Philox, parts: Parts, clock: "Clock"
) -> RoundResult:
    """Verify the scored draft of some rows and read the decision."""
    targets, allowed, draft = parts.targets, None, team.draft
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
    read = partial(_read, scored, type(parts.drafter).__name__, parts.features.top, alternatives(sessions))
    own = _rows_of(rng, team.index, len(rng.seeds))
    result = decide(scored, lambda: own, team.rule, read, timer=clock)
    if faults:
        result = replace(result, faults=[faults.get(b, fault) for b, fault in enumerate(result.faults)])
    return result


def alternatives(sessions: Sequence[Session]) -> int | None:
    """Return how many alternatives to each token some row wants with its log-probabilities; None: no row wants any."""
    wanted = [s.request.logprobs for s in sessions if s.request.logprobs is not None]
    return max(wanted) if wanted else None


def _read(scored: Scored, drafter: str, top: int, logprobs: int | None, decision: Decision) -> RoundResult | None:
    """Copy all that the CPU needs of a decision in one tensor: the round's one synchronisation.

    None where the kernels found a fault: only the reference can tell what it is.
    """
    verdict, draft = decision.verdict, scored.draft
    nodes = positions_of(verdict)
    B, J = nodes.shape
    parts = [verdict.tokens, draft.lengths[:, None], decision.sound[:, None], decision.faults[:, None].long()]
    if logprobs is not None:
        p = scored.distribution(decision.draft) if decision.p is None else decision.p
        columns = _log_probs(scored.logits, p, verdict.tokens, nodes, logprobs)
        parts.append(columns.flatten(1).double().view(torch.long))
    on_gpu = top > 0 and not is_cpu(nodes.device)
    if on_gpu:
        likeliest = scored.logits.topk(top).indices
        parts.append(likeliest.gather(1, nodes[..., None].expand(B, J, top)).flatten(1))
    numbers = _fetched(parts)
    faults = numbers[:, J + 2].tolist()
    if decision.by_kernels and any(faults):
        return None
    rest = np.ascontiguousarray(numbers[:, J + 3 :])
    found = None
    if logprobs is not None:
        N = J * (2 + 2 * logprobs)
        found = rest[:, :N].copy().view(np.float64).reshape(B, J, 2 + 2 * logprobs).tolist()
    return RoundResult(
        numbers[:, :J].tolist(),
        numbers[:, J].tolist(),
        numbers[:, J + 1].tolist(),
        [_draft_fault(draft, drafter, b, bits, scored.logits.shape[-1]) for b, bits in enumerate(faults)],
        found,
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


def _log_probs(
    logits: Float[Tensor, "B J V"], p: Distribution, tokens: Int[Tensor, "B J"], nodes: Int[Tensor, "B J"], more: int
) -> Float[Tensor, "B J N"]:
    """Return each emitted token's log-probability: raw, under what it was drawn from, then `more` likeliest tokens.

    The raw distribution is the softmax of the logits. Of the likeliest tokens come the ids, then the raw values.
    """
    B, J = nodes.shape
    rows = torch.arange(B, device=nodes.device)[:, None].expand(B, J)
    raw = logits[rows, nodes].double().log_softmax(-1)
    drawn = p.at(rows.flatten(), nodes.flatten()).log_prob(tokens.flatten()).view(B, J)
    columns = [raw.gather(2, tokens.clamp_min(0)[..., None]), drawn.double()[..., None]]
    if more:
        best = raw.topk(more)
        columns += [best.indices.double(), best.values]
    return torch.cat(columns, -1)


# ----------------------------------------------------------------------------------------------------- what rows get


def _emitted(
    b: int, session: Session, result: RoundResult, forward: Forward, states: StatesByRow | None, parts: Parts
) -> Emitted:
    """Return what the round gave row b."""
    emitted, kept, fault = _count(result.tokens[b]), result.sound[b], result.faults[b]
    if fault is not None:
        return Emitted([], fault=fault)
    if kept < emitted:
        at = len(session.tokens) + kept
        fault = (
            f"the scores after token {at} are not a distribution: the model gave NaN or infinity, or nothing is "
            "allowed there"
        )
    asked = session.request.logprobs
    numbers = [] if result.logprobs is None or asked is None else result.logprobs[b][:kept]
    return Emitted(
        result.tokens[b][:kept],
        result.drafted[b],
        emitted - 1,
        [_token_logprobs(token, row, asked or 0) for token, row in zip(result.tokens[b], numbers, strict=False)],
        _target_outputs(forward, states, parts.features, result, b, kept, len(session.tokens) + kept - 1),
        fault,
        None if result.deviation is None else result.deviation[b],
    )


def _token_logprobs(token: int, numbers: list[float], most: int) -> TokenLogprobs:
    half = (len(numbers) - 2) // 2
    ids, values = numbers[2 : 2 + half], numbers[2 + half :]
    top = [(int(i), value) for i, value in zip(ids[:most], values[:most], strict=True)]
    return TokenLogprobs(token, numbers[0], numbers[1], top)


def _count(tokens: list[int]) -> int:
    return len(tokens) - tokens.count(PAD)


def _states_by_row(forward: Forward, result: RoundResult) -> StatesByRow | None:
    """Split the states of a pass into those of its rows, in one call for each layer instead of one for each row.

    None where rows get copies: the kept path of a tree, and passes that the next writes over, as a recorded graph does.
    """
    if result.path is not None or not is_cpu(result.nodes.device):
        return None
    return list(zip(*(states.unbind(0) for states in forward.hidden), strict=True))


def _target_outputs(
    forward: Forward,
    states: StatesByRow | None,
    features: TargetFeatures,
    result: RoundResult,
    b: int,
    kept: int,
    stop: int,
) -> TargetOutputs | None:
    """Return what the drafter asked to see of the positions that were kept."""
    if not features.top and not features.layers:
        return None
    top = None
    if result.top is not None:
        top = torch.tensor(result.top[b][:kept], dtype=torch.long).view(kept, features.top)
    elif features.top:
        top = forward.logits[b, result.nodes[b, :kept]].topk(features.top).indices
    if not forward.hidden:
        hidden: tuple[Tensor, ...] = ()
    elif states is None:
        hidden = tuple(each[b, result.nodes[b, :kept]] for each in forward.hidden)
    else:
        hidden = states[b] if kept == len(states[b][0]) else tuple(each[:kept] for each in states[b])
    return TargetOutputs(stop, top, hidden)


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
    resolve(rule)  # refuses what is not a rule
    if drafter is None:
        return Parts(model, NoDrafter(), "coupled", features_of(NoDrafter()), targets)
    return Parts(model, drafter, rule, features_of(drafter), targets)
