"""Decide a round: `verify` for other people's engines and `decide` for ours, on one path.

`decide` takes the Triton kernels where they serve the call, compiled loops for the rows that they serve on a CPU, else
the PyTorch rules. All make the same decisions from the same random numbers. Kernels and loops work on raw scores and
write out no distribution; what they flag as faulty is decided again by the reference, which can say what is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import is_cpu, runs_kernels
from draftproof.core.distribution import Distribution, DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, plain_temperature, warp, warp_without_sync
from draftproof.core.tree import real
from draftproof.core.types import PAD, Draft, History, Verdict
from draftproof.rules import RULES, Verifier, cpu_verify, resolve
from draftproof.rules.chain import refuse_inexact
from draftproof.rules.checks import (
    BAD_DRAFT,
    BAD_TARGET,
    MIXED_DRAFT,
    Samplings,
    check_same_shape,
    check_shapes,
    explain_faults,
    lengths_of,
    rng_of,
    samplings_of,
    screened,
    screened_q,
)

Histories = Sequence[History | tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]]


def verify(
    target_logits: Float[Tensor, "B J V"],
    draft_tokens: Int[Tensor, "B K"],
    draft_logits: Float[Tensor, "B K R"] | None = None,
    *,
    draft_lengths: Int[Tensor, " B"] | None = None,
    sampling: Samplings | None = None,
    draft_sampling: Samplings | None = None,
    history: Histories | None = None,
    allowed: Bool[Tensor, "B J V"] | None = None,
    parents: Int[Tensor, "B K"] | None = None,
    rule: str | Verifier = "block",
    seeds: Int[Tensor, " B"] | int | None = None,
    positions: Int[Tensor, " B"] | int | None = None,
    draft_ids: Int[Tensor, " R"] | None = None,
) -> Verdict:
    """Decide which draft tokens are kept and what follows them, with exactly the target's distribution.

    target_logits   the target's raw scores: position 0 before the draft, position i + 1 after draft token i
    draft_tokens    what the drafter proposed
    draft_logits    the raw scores the drafter drew from; None: it chose its tokens without drawing (n-gram, argmax)
    draft_lengths   how many tokens of each row count, 0 to K; all if None
    sampling        how the target's tokens are to be drawn; one for all rows or one for each; None: plain softmax
    draft_sampling  how the draft's tokens *were* drawn; needed with draft_logits unless `sampling` is plain softmax
    history         (prompt tokens, output tokens) of each row; needed by the penalties
    allowed         which tokens may come at each scored position; None: all
    parents         the parent slot of each draft token, -1 for the root, if the draft is a tree (rule="tree")
    rule            "block" (keeps most), "token", "coupled" (the text depends on the seed alone), "tree", or a Verifier
    seeds           one for each row; None: drawn from torch's default generator
    positions       index of the first token this call emits in each row, prompt counted; needed with seeds, as
                    otherwise every round would use the same random numbers again
    draft_ids       the target's id of each entry of a smaller draft vocabulary; `torch.arange(R)` where the target's
                    is merely padded

    Returns a Verdict: `tokens` [B, K + 1] (the kept ones, one more, then -1) and `accepted` [B].

    >>> import torch, draftproof as dp
    >>> torch.manual_seed(0)                                      # doctest: +SKIP
    >>> B, K, V = 2, 4, 32000
    >>> warm = dp.SamplingParams(temperature=0.8, top_p=0.95)
    >>> draft_logits = torch.randn(B, K, V)                       # your drafter's scores, and its own draws:
    >>> draft_tokens = dp.warp(draft_logits, [warm] * B).probs().flatten(0, 1).multinomial(1).view(B, K)
    >>> target_logits = torch.randn(B, K + 1, V)                  # your target's scores, in one pass
    >>> verdict = dp.verify(
    ...     target_logits, draft_tokens, draft_logits, sampling=warm, draft_sampling=warm
    ... )
    >>> for row, kept in zip(verdict.tokens, verdict.accepted):
    ...     new_tokens = row[: kept + 1]                          # append these, and go on
    """
    resolve(rule)  # refuses what is not a rule
    B, K, V = check_shapes(target_logits, draft_tokens, draft_logits, draft_ids)
    target_logits, draft_tokens = target_logits.detach(), draft_tokens.long()
    draft_logits = None if draft_logits is None else draft_logits.detach()
    samplings = samplings_of("sampling", sampling, B)
    if draft_logits is not None and draft_sampling is None and not all(s.neutral for s in samplings):
        raise ValueError(
            "draft_sampling must say how the draft's tokens were drawn: sampling is not plain softmax, and the "
            "distribution of a drawn token cannot be guessed. Pass draft_sampling=sampling if both use the same"
        )
    check_same_shape("allowed", allowed, (B, K + 1, V))
    check_same_shape("parents", parents, (B, K))
    raw = None
    if draft_logits is not None:
        raw = RawDraft(draft_logits, samplings_of("draft_sampling", draft_sampling, B), draft_ids)
    scored = Scored(
        target_logits,
        samplings,
        Draft(draft_tokens, lengths_of(draft_lengths, draft_tokens), parents=parents),
        None if history is None else [History(*row) for row in history],  # type: ignore[arg-type]
        allowed,
        raw,
    )

    rng = cache(partial(rng_of, seeds, positions, samplings, target_logits.device))
    return decide(scored, rng, rule, _verdict_without_faults, refuse=partial(explain_faults, scored.draft, allowed))


def _verdict_without_faults(decision: "Decision") -> Verdict | None:
    return None if decision.by_kernels and bool(decision.faults.any()) else decision.verdict


@dataclass(frozen=True, slots=True)
class RawDraft:
    """A drafter's raw scores, from which q is still to be made; `ids` names the entries of a smaller vocabulary."""

    logits: Float[Tensor, "B K R"]
    samplings: Sequence[SamplingParams]
    ids: Int[Tensor, " R"] | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft, the target's raw scores of it and how tokens are to be drawn: all that a rule decides from.

    `raw_draft` is for a draft whose q is not made yet. `target` makes p where another host does so with processors of
    its own; kernels do not serve such a round.
    """

    logits: Float[Tensor, "B J V"]
    samplings: Sequence[SamplingParams]
    draft: Draft
    history: Sequence[History] | None = None
    allowed: Bool[Tensor, "B J V"] | None = None
    raw_draft: RawDraft | None = None
    target: Callable[[Draft], Distribution] | None = None

    def distribution(self, draft: Draft) -> Distribution:
        """Return p: what plain decoding would draw from at every scored position."""
        if self.target is not None:
            return self.target(draft)
        return warp_without_sync(self.logits, self.samplings, self.history, draft=draft, allowed=self.allowed)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and what was found wrong with its inputs, all on the device: nothing was synchronised.

    faults  bits a row (`rules.checks`); where they are not 0 the row's verdict does not hold, with one exception:
            under BAD_TARGET its first `sound` tokens do
    sound   how many emitted tokens of each row were drawn from distributions: all, or those before the first position
            whose scores are not a distribution
    p       the target's distributions, where they were written out
    draft   the draft as it was verified, q included; rows with a faulty draft are empty
    """

    verdict: Verdict
    faults: Int[Tensor, " B"]
    sound: Int[Tensor, " B"]
    by_kernels: bool
    draft: Draft
    p: Distribution | None = None


Result = TypeVar("Result")
Timer = Callable[[str], AbstractContextManager[None]]
Random = Callable[[], Philox]
"""Makes the round's random numbers, once the inputs were not refused: a refused call leaves torch's generator alone."""

Refuse = Callable[[Draft, Int[Tensor, " B"], Distribution], None]
"""Raises for the faults of a round, given the draft with its q, the bits and p; it may synchronise."""


@contextmanager
def untimed(stage: str) -> Iterator[None]:
    """Measure nothing."""
    yield


def decide(
    scored: Scored,
    rng: Random,
    rule: str | Verifier,
    read: Callable[[Decision], Result | None],
    *,
    refuse: Refuse | None = None,
    timer: Timer = untimed,
) -> Result:
    """Verify a draft by kernels or by the reference, and return what `read` made of the decision.

    `read` copies to the CPU what its caller needs, in one synchronisation. It returns None where the kernels' decision
    has faults: the reference then decides again. There `refuse`, if given, may raise for them; without it rows with a
    faulty draft are verified without their draft, and the decision says which.
    """
    if serves(scored, rule):
        with timer("verify"):
            decision = _by_kernels(scored, rng(), str(rule))
        with timer("commit"):
            result = read(decision)
        if result is not None:
            return result
    verifier = RULES[rule] if isinstance(rule, str) else rule
    if refuse is None and serves_on_cpu(scored, rule):
        decision = _by_compiled_rules(scored, rng(), str(rule), verifier, timer)
    else:
        decision = _by_reference(scored, rng, verifier, refuse, timer)
    with timer("commit"):
        result = read(decision)
    assert result is not None, "the reference's decision is final"
    return result


def serves(scored: Scored, rule: str | Verifier) -> bool:
    """Tell whether the kernels implement this rule and take this draft. A rule passed as a function is not theirs."""
    draft = scored.draft
    q_logits = None if draft.q is None else draft.q.logits
    q_logits = q_logits if scored.raw_draft is None else scored.raw_draft.logits
    chain = draft.parents is None and scored.target is None
    return chain and runs_kernels(scored.logits.device) and kernels.serves(scored.logits, draft.tokens, rule, q_logits)


# ---------------------------------------------------------------------------------------------------- the reference


def _by_reference(scored: Scored, rng: Random, rule: Verifier, refuse: Refuse | None, timer: Timer) -> Decision:
    """Write out p and q, check them, and apply the rule. On a GPU nothing here synchronises unless `refuse` does."""
    with timer("warp"):
        draft, faults = screened(scored.draft, scored.logits.shape[-1])
        if scored.raw_draft is not None:
            draft, wrong_q = screened_q(replace(draft, q=_made_q(scored, scored.raw_draft, draft)))
            faults = faults | wrong_q
        p, broken = _mended(scored.distribution(draft))
        faults = faults | BAD_TARGET * broken.any(1)
        if refuse is not None:
            refuse(draft, faults, p)
    with timer("verify"):
        verdict = rule(p, draft, rng())
    drawn = (verdict.tokens != PAD) & ~broken.gather(1, positions_of(verdict))
    return Decision(verdict, faults, drawn.long().cumprod(1).sum(1), by_kernels=False, draft=draft, p=p)


def _made_q(scored: Scored, raw: RawDraft, draft: Draft) -> Distribution:
    """Make the distribution the draft's tokens were drawn from."""
    vocab = None if raw.ids is None else DraftVocab.of(raw.ids, scored.logits.shape[-1])
    return warp(raw.logits, raw.samplings, scored.history, draft, vocab=vocab)


def _mended(p: Distribution) -> tuple[Distribution, Bool[Tensor, "B J"]]:
    """Replace positions that have no distribution by a point mass, and say which: NaN scores, or nothing allowed.

    A draft may lead to such a position although the text never gets there. The point mass keeps the distribution of
    everything before it, and a request fails only if it gets there, as in plain decoding.
    """
    broken = p.lse.isnan()
    if is_cpu(broken.device) and not bool(broken.any()):  # on a GPU this test would synchronise
        return p, broken
    return replace(p, lse=p.lse.masked_fill(broken, 0.0), point=p.point.masked_fill(broken, 0), plain=False), broken


def positions_of(verdict: Verdict) -> Int[Tensor, "B J"]:
    """Return the scored position from which each emitted token was drawn."""
    B, J = verdict.tokens.shape
    if verdict.path is None:
        return torch.arange(J, device=verdict.tokens.device).expand(B, J)
    return torch.nn.functional.pad(verdict.path.clamp_min(PAD) + 1, (1, 0))


# ----------------------------------------------------------------------------------------------- compiled for a CPU


def serves_on_cpu(scored: Scored, rule: str | Verifier) -> bool:
    """Tell whether some rows of a round may be served by compiled loops; which ones is found out row by row."""
    return (
        scored.target is None
        and scored.raw_draft is None
        and any(plain_temperature(sampling) is not None for sampling in scored.samplings)
        and cpu_verify.has_compiled(rule, scored.draft, scored.logits)
    )


def _by_compiled_rules(scored: Scored, rng: Philox, rule: str, verifier: Verifier, timer: Timer) -> Decision:
    """Verify the rows that compiled loops serve by them, and the others by the reference."""
    with timer("verify"):
        temperatures = [
            plain_temperature(sampling) if _allows_all(scored, b) else None
            for b, sampling in enumerate(scored.samplings)
        ]
        made = cpu_verify.verify_rows(scored.logits, temperatures, scored.draft, rng, rule)
    verdict, draft = Verdict(made.tokens, made.accepted), scored.draft
    faults, sound = torch.zeros_like(made.accepted), made.accepted + 1
    left = [b for b, served in enumerate(made.served) if not served]
    if left:
        index = torch.tensor(left)
        rest = _by_reference(_some_rows(scored, index), lambda: rng.take(index), verifier, None, timer)
        lengths = draft.lengths.index_copy(0, index, rest.draft.lengths)
        draft = replace(draft, tokens=draft.tokens.clamp(PAD, scored.logits.shape[-1] - 1), lengths=lengths)
        verdict.tokens.index_copy_(0, index, rest.verdict.tokens)
        verdict.accepted.index_copy_(0, index, rest.verdict.accepted)
        faults.index_copy_(0, index, rest.faults)
        sound.index_copy_(0, index, rest.sound)
    return Decision(verdict, faults, sound, by_kernels=False, draft=draft)


def _allows_all(scored: Scored, b: int) -> bool:
    return scored.allowed is None or bool(scored.allowed[b].all())


def _some_rows(scored: Scored, index: Int[Tensor, " N"]) -> Scored:
    """Return some rows of a round; its q is made already."""
    rows, draft = index.tolist(), scored.draft
    K = draft.tokens.shape[1]
    part = Draft(
        draft.tokens[index],
        draft.lengths[index],
        None if draft.q is None else draft.q.rows(index, K),
        None if draft.drawn is None else draft.drawn[index],
    )
    return Scored(
        scored.logits[index],
        [scored.samplings[b] for b in rows],
        replace(part, shared_rng=draft.shared_rng),
        None if scored.history is None else [scored.history[b] for b in rows],
        None if scored.allowed is None else scored.allowed[index],
    )


# ------------------------------------------------------------------------------------------------------ the kernels


def _by_kernels(scored: Scored, rng: Philox, rule: str) -> Decision:
    """Launch the kernels on the raw scores. Nothing is synchronised."""
    if rule != "coupled":
        refuse_inexact(scored.draft, rule)
    K = scored.draft.tokens.shape[1]
    lengths = scored.draft.lengths.clamp(0, K)
    draft = replace(scored.draft, tokens=scored.draft.tokens.long().contiguous(), lengths=lengths)
    if scored.raw_draft is not None:
        rows = _with_raw_draft(scored, scored.raw_draft, draft, rng, rule)
    else:
        rows = _with_settled_draft(scored, draft, rng, rule)
    faults = torch.where(lengths == scored.draft.lengths, rows.faults, BAD_DRAFT)
    return Decision(Verdict(rows.tokens, rows.accepted), faults, rows.accepted + 1, by_kernels=True, draft=draft)


def _with_raw_draft(scored: Scored, raw: RawDraft, draft: Draft, rng: Philox, rule: str) -> kernels.Rows:
    """Verify a draft given by raw scores: the kernels warp both sides."""
    V, samplings = scored.logits.shape[-1], scored.samplings
    vocab = None if raw.ids is None else _unchecked_vocab(raw.ids, V)
    rows = kernels.verify_rows(
        scored.logits,
        draft.tokens,
        raw.logits,
        rule=rule,
        parameters=kernels.Parameters.of(
            samplings, raw.samplings, seeds=rng.seeds, positions=rng.starts, lengths=draft.lengths
        ),
        edits=kernels.Edits.of(samplings, raw.samplings, scored.history, draft.tokens, draft.lengths, V, vocab),
        allowed=None if scored.allowed is None else kernels.pack(scored.allowed),
        draft_entries=None if vocab is None else vocab.entry,
    )
    if vocab is None or raw.ids is None:
        return rows
    duplicate = vocab.entry[vocab.ids] != torch.arange(len(vocab.ids), device=vocab.ids.device)
    wrong_ids = (duplicate | vocab.ids.not_equal(raw.ids)).any()
    return rows._replace(faults=torch.where(wrong_ids, BAD_DRAFT, rows.faults))


def _unchecked_vocab(draft_ids: Int[Tensor, " R"], V: int) -> DraftVocab:
    """Make a `DraftVocab` without a device sync: out-of-range or duplicate ids are reported with the other faults."""
    ids = draft_ids.long().clamp(0, V - 1)
    entry = torch.full((V,), PAD, dtype=torch.long, device=ids.device)
    return DraftVocab(ids, entry.scatter_(0, ids, torch.arange(len(ids), device=ids.device)))


def _with_settled_draft(scored: Scored, draft: Draft, rng: Philox, rule: str) -> kernels.Rows:
    """Verify a draft whose distributions its drafter has already made, or whose tokens were chosen."""
    final = [SamplingParams()] * len(scored.samplings)  # q is final: nothing is left to be done to its logits
    parameters = kernels.Parameters.of(
        scored.samplings, final, seeds=rng.seeds, positions=rng.starts, lengths=draft.lengths
    )
    V = scored.logits.shape[-1]
    edits = kernels.Edits.of(scored.samplings, final, scored.history, draft.tokens, draft.lengths, V)
    allowed = None if scored.allowed is None else kernels.pack(scored.allowed)
    if draft.q is None or rule == "coupled" or draft.tokens.shape[1] == 0:
        return kernels.verify_rows(
            scored.logits, draft.tokens, parameters=parameters, rule=rule, edits=edits, allowed=allowed
        )
    kind = _kind_of(draft, draft.q)
    parameters["draft_temperature"].copy_(kind.temperature)
    rows = kernels.verify_rows(
        scored.logits,
        draft.tokens,
        draft.q.logits,
        parameters=parameters,
        rule=rule,
        edits=edits,
        allowed=allowed,
        draft_entries=None if draft.q.vocab is None else draft.q.vocab.entry,
        draft_lse=draft.q.lse,
        draft_cutoff=draft.q.cutoff,
    )
    return rows._replace(faults=rows.faults + MIXED_DRAFT * kind.mixed)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a row's draft was drawn: its temperature, 0 where it was chosen; `mixed` where not all in one way."""

    temperature: Float[Tensor, " B"]
    mixed: Bool[Tensor, " B"]


def _kind_of(draft: Draft, q: Distribution) -> _Kind:
    there = real(draft)
    temperature = 1 / q.scale[:, 0]
    differs = (there & (q.scale != q.scale[:, :1])).any(1)
    if q.plain and draft.drawn is None:
        return _Kind(temperature, differs)
    drawn = there if draft.drawn is None else there & draft.drawn
    point = q.point != PAD
    certain = ((point | ~drawn) & there).sum(1)
    wrong = (point & drawn & (q.point != draft.tokens)).any(1)  # the token was not drawn from that distribution
    chosen = certain == draft.lengths
    return _Kind(temperature.masked_fill(chosen, 0.0), wrong | (~chosen & (differs | (certain > 0))))
