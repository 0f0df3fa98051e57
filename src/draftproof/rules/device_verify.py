"""Verify drafts on a GPU while the host is elsewhere: parameters, random numbers and verdicts stay on the device.

The verdicts are those of `rules.api.decide`.
"""

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import runs_kernels
from draftproof.core.sampling import SamplingParams, any_edits
from draftproof.core.types import Draft
from draftproof.kernels.call import MOST_DRAFTED, MOST_TOKENS, RULES
from draftproof.rules import Verifier

__all__ = ["MOST_DRAFTED", "DeviceVerification", "refusal", "verify"]


def refusal(
    samplings: Sequence[SamplingParams], rule: str | Verifier, vocab_size: int, device: torch.device
) -> str | None:
    """Return why the kernels alone cannot verify the drafts of these rows; None if they can."""
    if not runs_kernels(device):
        return f"kernels do not run on {device.type}"
    if vocab_size > MOST_TOKENS:
        return f"the kernels take vocabularies of up to {MOST_TOKENS} tokens, and this one has {vocab_size}"
    if rule not in RULES:
        return f"rule {rule!r} is not one of the kernels'"
    if any_edits(samplings):
        return "penalties and biases depend on tokens that the host counts"
    return None


class DeviceVerification:
    """Sampling parameters of up to `rows` rows, in memory that never moves."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._parameters = kernels.Parameters.empty(rows, device)

    def load(
        self,
        samplings: Sequence[SamplingParams],
        draft_temperatures: Sequence[float],
        seeds: Int[Tensor, " B"],
    ) -> Hashable:
        """Copy to the device how rows are to be drawn; return what a recording depends on besides its sizes.

        draft_temperatures  0 where the draft's tokens are chosen. Filters of the draft are known by their cutoffs
        """
        drawn = [SamplingParams(temperature=temperature) for temperature in draft_temperatures]
        B, nothing = len(samplings), torch.zeros_like(seeds)
        made = kernels.Parameters.of(samplings, drawn, seeds=seeds, positions=nothing, lengths=nothing)
        self._parameters.floats[:B].copy_(made.floats)
        self._parameters.ints[:B].copy_(made.ints)
        return made.filtered, made.warm, made.nucleus

    def parameters(self, B: int, traits: Hashable) -> kernels.Parameters:
        """Return the parameters of the first B rows, whose positions and lengths a round writes; traits: of `load`."""
        assert isinstance(traits, tuple)
        return kernels.Parameters(self._parameters.floats[:B], self._parameters.ints[:B], *traits)


def verify(logits: Float[Tensor, "B J V"], draft: Draft, rule: str, parameters: kernels.Parameters) -> kernels.Rows:
    """Verify without a sync, so that it can be captured."""
    q = None if rule == "coupled" else draft.q
    if q is None:
        return kernels.verify_rows(logits, draft.tokens, parameters=parameters, rule=rule)
    return kernels.verify_rows(
        logits,
        draft.tokens,
        q.logits,
        parameters=parameters,
        rule=rule,
        draft_entries=None if q.vocab is None else q.vocab.entry,
        draft_lse=q.lse,
        draft_cutoff=q.cutoff,
    )
