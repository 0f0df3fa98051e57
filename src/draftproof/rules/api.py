"""The entrance for other people's engines: raw logits in, verdict out, and nothing assumed silently."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.distribution import Distribution, DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.tree import check_parents, real
from draftproof.core.types import PAD, Draft, History, Verdict
from draftproof.rules import RULES, Verifier, resolve
from draftproof.rules.chain import refuse_inexact
from draftproof.rules.checks import (
    Samplings,
    check_distribution,
    check_drawn,
    check_lengths,
    check_same_shape,
    check_shapes,
    check_tokens,
    lengths_of,
    rng_of,
    samplings_of,
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

    target_logits   the target's raw scores: position 0 before the draft, position i + 1 behind draft token i
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
                    otherwise every round would throw the same coins again
    draft_ids       the target's id of each entry of a smaller draft vocabulary; `torch.arange(R)` where the target's
                    is merely padded

    Returns a Verdict: `tokens` [B, K + 1] (kept ones, one closing token, then -1) and `accepted` [B].

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
    B, K, V = check_shapes(target_logits, draft_tokens, draft_logits, draft_ids)
    samplings = samplings_of("sampling", sampling, B)
    if draft_logits is not None and draft_sampling is None and not all(s.neutral for s in samplings):
        raise ValueError(
            "draft_sampling must say how the draft's tokens were drawn: sampling is not plain softmax, and the "
            "distribution of a drawn token cannot be guessed. Pass draft_sampling=sampling if both use the same"
        )
    given = _Given(
        target_logits,
        draft_tokens,
        draft_logits,
        lengths_of(draft_lengths, draft_tokens),
        samplings,
        samplings_of("draft_sampling", draft_sampling, B),
        None if history is None else [History(*row) for row in history],  # type: ignore[arg-type]
        allowed,
        parents,
        None if draft_logits is None else draft_ids,
        cache(partial(rng_of, seeds, positions, samplings, target_logits.device)),
    )
    check_same_shape("allowed", allowed, (B, K + 1, V))
    check_same_shape("parents", parents, (B, K))
    found = _by_kernels(given, rule)
    return _by_reference(given, resolve(rule)) if found is None else found


@dataclass(frozen=True, slots=True)
class _Given:
    """A call of `verify`, its shapes checked and its values not yet."""

    target: Tensor
    tokens: Tensor
    draft: Tensor | None
    lengths: Tensor
    samplings: list[SamplingParams]
    drafts: list[SamplingParams]
    seen: list[History] | None
    allowed: Tensor | None
    parents: Tensor | None
    draft_ids: Tensor | None
    rng: Callable[[], Philox]
    """Drawn when all else is known to be right: a call that is refused leaves torch's generator as it was."""


def _by_kernels(given: _Given, rule: str | Verifier) -> Verdict | None:
    """The verdict in one wait; None where kernels do not serve the call, or find a fault that the reference can name.

    They serve rules by name: who passes a function of his own, or of ours, has that function run.
    """
    if given.parents is not None or not kernels.serves(given.target, given.tokens, rule, given.draft):
        return None
    K, V = given.tokens.shape[1], given.target.shape[-1]
    tokens, lengths = given.tokens.long().contiguous(), given.lengths.clamp(0, K)
    drafts, rng = None if given.draft is None else given.drafts, given.rng()
    vocab = None if given.draft_ids is None else _unchecked(given.draft_ids, V)
    rows = kernels.verify_rows(
        given.target,
        tokens,
        given.draft,
        rule=str(rule),
        parameters=kernels.Parameters.of(
            given.samplings, given.drafts, seeds=rng.seeds, positions=rng.starts, lengths=lengths
        ),
        edits=kernels.Edits.of(given.samplings, drafts, given.seen, tokens, lengths, V, vocab),
        allowed=None if given.allowed is None else kernels.pack(given.allowed),
        draft_entries=None if vocab is None else vocab.entry,
    )
    wrong = (rows.faults != 0) | (lengths != given.lengths)
    if vocab is not None and given.draft_ids is not None:
        twice = vocab.entry[vocab.ids] != torch.arange(len(vocab.ids), device=wrong.device)
        wrong = torch.cat([wrong, twice, vocab.ids.not_equal(given.draft_ids)])
    return None if bool(wrong.any()) else Verdict(rows.tokens, rows.accepted)


def _unchecked(draft_ids: Int[Tensor, " R"], V: int) -> DraftVocab:
    """`DraftVocab.of` without a look at the ids: a clamped one, or two of the same, show when all is looked at together."""
    ids = draft_ids.long().clamp(0, V - 1)
    entry = torch.full((V,), PAD, dtype=torch.long, device=ids.device)
    return DraftVocab(ids, entry.scatter_(0, ids, torch.arange(len(ids), device=ids.device)))


def _by_reference(given: _Given, verifier: Verifier) -> Verdict:
    """Look at every value, say what is wrong with it, and judge."""
    check_lengths(given.lengths, given.tokens.shape[1])
    draft = Draft(given.tokens, given.lengths, parents=given.parents)
    check_tokens(draft, given.target.shape[-1])
    check_parents(draft)
    p = warp(given.target, given.samplings, given.seen, draft, given.allowed)
    check_distribution("target_logits", p, given.allowed, torch.ones_like(p.lse, dtype=torch.bool))
    if given.draft is not None:
        vocab = None if given.draft_ids is None else DraftVocab.of(given.draft_ids, given.target.shape[-1])
        q = warp(given.draft, given.drafts, given.seen, draft, vocab=vocab)
        check_distribution("draft_logits", q, None, real(draft))
        draft = Draft(given.tokens, given.lengths, q, parents=given.parents)
        check_drawn(draft, q)
    return verifier(p, draft, given.rng())


MIXED_DRAFT = 8
"""A fault beside the kernels' own: the distributions of one row's draft differ in kind, which they are not made for."""


def serves(logits: Float[Tensor, "B J V"], draft: Draft, rule: str | Verifier) -> bool:
    """Whether the kernels know this rule, and can take this draft where it lies."""
    dist = None if draft.q is None else draft.q.logits
    return draft.parents is None and kernels.serves(logits, draft.tokens, _name(rule), dist)


def verify_draft(
    logits: Float[Tensor, "B J V"],
    samplings: Sequence[SamplingParams],
    draft: Draft,
    rng: Philox,
    rule: str | Verifier,
    *,
    history: Sequence[History] | None = None,
    allowed: Bool[Tensor, "B J V"] | None = None,
) -> kernels.Rows:
    """Judge a draft by raw target logits and by the distributions it was drawn from, as its drafter settled them."""
    name = _name(rule)
    if name != "coupled":
        refuse_inexact(draft, name)
    tokens, lengths = draft.tokens.contiguous(), draft.lengths
    settled = [SamplingParams()] * len(
        samplings
    )  # the draft's distributions are final: nothing is left to be done to them
    parameters = kernels.Parameters.of(samplings, settled, seeds=rng.seeds, positions=rng.starts, lengths=lengths)
    edits = kernels.Edits.of(samplings, settled, history, tokens, lengths, logits.shape[-1])
    bits = None if allowed is None else kernels.pack(allowed)
    if draft.q is None or name == "coupled" or tokens.shape[1] == 0:
        return kernels.verify_rows(logits, tokens, parameters=parameters, rule=name, edits=edits, allowed=bits)
    dist, kind = draft.q, _kind(draft, draft.q)
    parameters["draft_temperature"].copy_(kind.temperature)
    rows = kernels.verify_rows(
        logits,
        tokens,
        dist.logits,
        parameters=parameters,
        rule=name,
        edits=edits,
        allowed=bits,
        draft_entries=None if dist.vocab is None else dist.vocab.entry,
        draft_lse=dist.lse,
        draft_cutoff=dist.cutoff,
    )
    return rows._replace(faults=rows.faults + MIXED_DRAFT * kind.odd)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a row's draft was drawn: at which temperature, 0 where it was chosen. `odd`: not all of it in one way."""

    temperature: Float[Tensor, " B"]
    odd: Bool[Tensor, " B"]


def _kind(draft: Draft, dist: Distribution) -> _Kind:
    there = real(draft)
    temperature = 1 / dist.scale[:, 0]
    differs = (there & (dist.scale != dist.scale[:, :1])).any(1)
    if dist.plain and draft.drawn is None:
        return _Kind(temperature, differs)
    drawn = there if draft.drawn is None else there & draft.drawn
    point = dist.point != PAD
    sure = ((point | ~drawn) & there).sum(1)
    wrong = (point & drawn & (dist.point != draft.tokens)).any(1)  # it was not drawn from that distribution
    chosen = sure == draft.lengths
    return _Kind(temperature.masked_fill(chosen, 0.0), wrong | (~chosen & (differs | (sure > 0))))


def _name(rule: str | Verifier) -> str:
    """A rule's name; nothing that the kernels know for one that has none."""
    return rule if isinstance(rule, str) else next((name for name, known in RULES.items() if known is rule), "")
