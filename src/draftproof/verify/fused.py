"""The rules in kernels: a scored draft to its verdict without a law being written out. Twin: `warp`, then the rule.

Nothing here waits for the device. A request whose `faults` are not 0 has no verdict yet: the reference knows what is to
be said of it, and it costs a wait that only such a round pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from draftproof import kernels
from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.sampling import Sampling
from draftproof.core.types import PAD, Draft, History
from draftproof.verify import RULES, Verifier
from draftproof.verify.chain import real, refuse_inexact

ODD_LAWS = 8
"""A fault beside the kernels' own: the laws of one row's draft differ in kind, which they are not made for."""


def serves(logits: Float[Tensor, "B J V"], draft: Draft, rule: str | Verifier) -> bool:
    """Whether the kernels know this rule, and can take this draft where it lies."""
    law = None if draft.law is None else draft.law.logits
    return draft.parents is None and kernels.serves(logits, draft.tokens, _name(rule), law)


def verify_draft(
    logits: Float[Tensor, "B J V"],
    samplings: Sequence[Sampling],
    draft: Draft,
    noise: Noise,
    rule: str | Verifier,
    *,
    history: Sequence[History] | None = None,
    allowed: Bool[Tensor, "B J V"] | None = None,
) -> kernels.Rows:
    """Judge a draft by raw target logits and by the laws it was drawn from, as its drafter settled them."""
    name = _name(rule)
    if name != "coupled":
        refuse_inexact(draft, name)
    tokens, lengths = draft.tokens.contiguous(), draft.lengths
    settled = [Sampling()] * len(samplings)  # the draft's laws are final: nothing is left to be done to them
    parameters = kernels.Parameters.of(samplings, settled, seeds=noise.seeds, positions=noise.starts, lengths=lengths)
    edits = kernels.Edits.of(samplings, settled, history, tokens, lengths, logits.shape[-1])
    bits = None if allowed is None else kernels.pack(allowed)
    if draft.law is None or name == "coupled" or tokens.shape[1] == 0:
        return kernels.verify_rows(logits, tokens, parameters=parameters, rule=name, edits=edits, allowed=bits)
    law, kind = draft.law, _kind(draft, draft.law)
    parameters["draft_temperature"].copy_(kind.temperature)
    rows = kernels.verify_rows(
        logits,
        tokens,
        law.logits,
        parameters=parameters,
        rule=name,
        edits=edits,
        allowed=bits,
        draft_entries=None if law.vocab is None else law.vocab.entry,
        draft_lse=law.lse,
        draft_cutoff=law.cutoff,
    )
    return rows._replace(faults=rows.faults + ODD_LAWS * kind.odd)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a row's draft was drawn: at which temperature, 0 where it was chosen. `odd`: not all of it in one way."""

    temperature: Float[Tensor, " B"]
    odd: Bool[Tensor, " B"]


def _kind(draft: Draft, law: Law) -> _Kind:
    there = real(draft)
    temperature = 1 / law.scale[:, 0]
    differs = (there & (law.scale != law.scale[:, :1])).any(1)
    if law.plain and draft.drawn is None:
        return _Kind(temperature, differs)
    drawn = there if draft.drawn is None else there & draft.drawn
    point = law.point != PAD
    sure = ((point | ~drawn) & there).sum(1)
    wrong = (point & drawn & (law.point != draft.tokens)).any(1)  # it was not drawn from that law
    chosen = sure == draft.lengths
    return _Kind(temperature.masked_fill(chosen, 0.0), wrong | (~chosen & (differs | (sure > 0))))


def _name(rule: str | Verifier) -> str:
    """A rule's name; nothing that the kernels know for one that has none."""
    return rule if isinstance(rule, str) else next((name for name, known in RULES.items() if known is rule), "")
