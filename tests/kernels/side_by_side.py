"""Run the kernel and its reference on the same input, for comparison."""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import draftproof as dp
from draftproof.core.distribution import DraftVocab
from draftproof.core.types import Draft, History, Verdict
from draftproof.kernels import Rows, verify_rows
from draftproof.kernels.call import pack
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits
from draftproof.rules import RULES

PLAIN = dp.SamplingParams()


@dataclass(frozen=True)
class Input:
    """One batch, as `draftproof.verify` takes it."""

    target: Tensor
    draft: Tensor | None
    tokens: Tensor
    lengths: Tensor
    samplings: list[dp.SamplingParams]
    drafts: list[dp.SamplingParams]
    seeds: Tensor
    positions: Tensor
    history: list[History] | None = None
    allowed: Tensor | None = None
    vocab: DraftVocab | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def chosen(self) -> "Input":
        """Return the same batch with a draft that was chosen, not drawn."""
        return replace(self, draft=None)


def make(
    samplings: list[dp.SamplingParams],
    *,
    K: int = 3,
    V: int = 1100,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    spread: float = 2.5,
    drafts: list[dp.SamplingParams] | None = None,
    ragged: bool = True,
    entries: int | None = None,
) -> Input:
    """Make random rows with a drafter near the target; draft tokens are drawn from the drafter's own distribution."""
    B, drafts = len(samplings), samplings if drafts is None else drafts
    generator = torch.Generator().manual_seed(seed)
    target = (spread * torch.randn(B, K + 1, V, generator=generator)).to(dtype)
    draft = (target[:, :K].float() + 0.7 * torch.randn(B, K, V, generator=generator)).to(dtype)
    vocab = None
    if entries is not None:
        vocab = DraftVocab.of(torch.randperm(V, generator=generator)[:entries], V)
        draft = draft[..., vocab.ids].contiguous()
    unpenalised = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    dist = dp.warp(draft, [replace(s, **unpenalised) for s in drafts], vocab=vocab)
    tokens = dist.probs().flatten(0, 1).multinomial(1, generator=generator).view(B, K)
    lengths = torch.randint(0, K + 1, (B,), generator=generator) if ragged else torch.full((B,), K)
    seeds = torch.randint(-(2**62), 2**62, (B,), generator=generator)
    positions = torch.randint(0, 2**20, (B,), generator=generator)
    if vocab is not None:
        vocab = DraftVocab(vocab.ids.to(device), vocab.entry.to(device))
    return Input(
        target.to(device), draft.to(device), tokens.to(device), lengths.to(device), samplings, drafts,
        seeds.to(device), positions.to(device), vocab=vocab,
    )  # fmt: skip


def reference(given: Input, rule: str) -> Verdict:
    """Return the reference verdict. The rule is wrapped: its name, or itself, may select the kernels on a GPU."""
    return dp.verify(
        given.target, given.tokens, given.draft, draft_lengths=given.lengths, sampling=given.samplings,
        draft_sampling=None if given.draft is None else given.drafts, history=given.history, allowed=given.allowed,
        rule=partial(RULES[rule]), seeds=given.seeds, positions=given.positions,
        draft_ids=None if given.vocab is None else given.vocab.ids,
    )  # fmt: skip


def parameters(given: Input) -> Parameters:
    return Parameters.of(
        given.samplings, given.drafts, seeds=given.seeds, positions=given.positions, lengths=given.lengths
    )


def kernel(given: Input, rule: str, **more: object) -> Rows:
    drafts = None if given.draft is None else given.drafts
    V = given.target.shape[-1]
    edits = Edits.of(given.samplings, drafts, given.history, given.tokens, given.lengths, V, given.vocab)
    return verify_rows(
        given.target, given.tokens, given.draft, parameters=parameters(given), rule=rule, edits=edits,
        allowed=None if given.allowed is None else pack(given.allowed),
        draft_entries=None if given.vocab is None else given.vocab.entry, **given.extra, **more,
    )  # fmt: skip


def assert_equal(given: Input, rule: str, **more: object) -> None:
    got, want = kernel(given, rule, **more), reference(given, rule)
    assert got.faults.tolist() == [0] * len(given.tokens)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.accepted.tolist() == want.accepted.tolist()


__all__ = ["PLAIN", "Draft", "Input", "assert_equal", "kernel", "make", "parameters", "reference"]
