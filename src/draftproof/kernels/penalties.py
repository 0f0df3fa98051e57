"""Build the short lists of tokens that bias and penalties change, by position, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import DraftVocab
from draftproof.core.draw import CHUNK
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import History
from draftproof.kernels.workspace import chunks

NO_TOKEN: Final = 2**30
"""Pads shorter lists; larger than any token, so that it sorts to the end."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of a few logits of each row, applied before anything else: x → f · (x + bias) − spent.

    tokens  edited tokens for target (0) and draft (1) of a request, sorted, then NO_TOKEN; on the draft's side entries
            of the draft vocabulary
    values  for each distribution row and token: bias, the factor if x + bias is positive, the factor if not, and spent
    first   for each chunk of a row the index of its first token, and one more
    """

    tokens: Int[Tensor, "B 2 E"]
    values: Float[Tensor, "B N E 4"]
    first: Int[Tensor, "B 2 C1"]

    @classmethod
    def of(
        cls,
        samplings: Sequence[SamplingParams],
        draft_samplings: Sequence[SamplingParams] | None,
        history: Sequence[History] | None,
        draft_tokens: Int[Tensor, "B K"],
        lengths: Int[Tensor, " B"],
        V: int,
        vocab: DraftVocab | None = None,
    ) -> "Edits | None":
        """Build the edits without reading the draft on the host; None if there is nothing to edit.

        Reference: core.penalties.edited. `draft_samplings` is None if the draft was chosen. Draft tokens count as seen
        from their position on.
        """
        sides = [samplings, samplings if draft_samplings is None else draft_samplings]
        if not any(s.penalises or s.logit_bias for side in sides for s in side):
            return None
        penalised = [b for side in sides for b, s in enumerate(side) if s.penalises]
        if history is not None and len(history) != len(samplings):
            raise ValueError(f"history must have one entry a row: {len(samplings)} rows, {len(history)} entries")
        if penalised and history is None:
            raise ValueError(
                f"row {penalised[0]} asks for a penalty, which depends on what was seen: pass history, one "
                "(prompt_tokens, output_tokens) for each row"
            )
        J, device = draft_tokens.shape[1] + 1, draft_tokens.device
        seen = [History([], [])] * len(samplings) if history is None else history
        listed = [_token_counts(side, seen, V) for side in sides]
        E = max(len(line) for side in listed for line in side)
        on_device = [_side(side, lists, E, device) for side, lists in zip(sides, listed, strict=True)]
        real = torch.arange(J - 1, device=device) < lengths[:, None]
        drafted = draft_tokens.masked_fill(~real, NO_TOKEN)
        target = on_device[0].at(drafted, J)
        draft = on_device[1].at(drafted, J - 1)
        if vocab is not None:
            draft = _to_draft_entries(draft, vocab)
        tokens, order = torch.stack([target[0], draft[0]], 1).sort(-1)  # [B, 2, E + K]
        values = torch.cat([_reordered(target[1], order[:, 0]), _reordered(draft[1], order[:, 1])], 1)
        borders = torch.arange(chunks(V) + 1, device=device) * CHUNK
        first = torch.searchsorted(tokens, borders.expand(*tokens.shape[:2], -1).contiguous())
        return cls(tokens.int(), values.contiguous(), first.int())


def _token_counts(samplings: Sequence[SamplingParams], seen: Sequence[History], V: int) -> list[dict[int, list[float]]]:
    """Return for each row: token → [bias, count in the prompt, count in the output]."""
    lists = []
    for sampling, history in zip(samplings, seen, strict=True):
        line: dict[int, list[float]] = {int(t): [float(a), 0.0, 0.0] for t, a in sampling.logit_bias.items()}
        if sampling.penalises:
            for column, part in enumerate(history, start=1):
                for token in part.tolist() if isinstance(part, Tensor) else part:
                    line.setdefault(int(token), [0.0, 0.0, 0.0])[column] += 1
        if line and not 0 <= min(line) <= max(line) < V:
            raise ValueError(
                f"history and logit_bias name tokens from {min(line)} to {max(line)}; the vocabulary is [0, {V})"
            )
        lists.append(line)
    return lists


@dataclass(frozen=True, slots=True)
class _Side:
    """The lists of target or draft on the device, before draft tokens are added."""

    tokens: Int[Tensor, "B E"]
    counts: Float[Tensor, "B E 3"]
    penalties: Float[Tensor, "B 3"]

    def at(self, drafted: Int[Tensor, "B K"], rows: int) -> tuple[Int[Tensor, "B F"], Float[Tensor, "B N F 4"]]:
        """Return tokens and values at each of `rows` positions; a draft token counts at the positions after it."""
        K = drafted.shape[1]
        same = (drafted[:, :, None] == drafted[:, None]).tril(-1).any(-1)
        new = ~same & ~(drafted[:, :, None] == self.tokens[:, None]).any(-1)
        tokens = torch.cat([self.tokens, drafted.masked_fill(~new, NO_TOKEN)], 1)  # [B, F]
        counts = torch.nn.functional.pad(self.counts, (0, 0, 0, K))
        hits = ((drafted[:, :, None] == tokens[:, None]) & (tokens[:, None] < NO_TOKEN)).double()  # [B, K, F]
        before = torch.nn.functional.pad(hits.cumsum(1), (0, 0, 1, 0))[:, :rows]
        bias, prompt, output = counts[:, None].unbind(-1)
        output = output + before  # [B, N, F]
        repetition, presence, frequency = (part[:, None, None] for part in self.penalties.unbind(-1))
        factor = torch.where((output > 0) | (prompt > 0), repetition, 1.0)
        spent = presence * (output > 0) + frequency * output
        values = torch.stack([bias.expand_as(output), 1 / factor, factor, spent], -1)
        return tokens, values.float()


def _side(
    samplings: Sequence[SamplingParams], lists: list[dict[int, list[float]]], E: int, device: torch.device
) -> _Side:
    """Copy the lists of one side to the device."""
    tokens = [[*line, *[NO_TOKEN] * (E - len(line))] for line in lists]
    counts = [[*line.values(), *[[0.0] * 3] * (E - len(line))] for line in lists]
    penalties = [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for s in samplings]
    B = len(samplings)
    return _Side(
        torch.tensor(tokens, dtype=torch.long).view(B, E).to(device, non_blocking=True),
        torch.tensor(counts, dtype=torch.float64).view(B, E, 3).to(device, non_blocking=True),
        torch.tensor(penalties, dtype=torch.float64).to(device, non_blocking=True),
    )


def _to_draft_entries(draft: tuple[Tensor, Tensor], vocab: DraftVocab) -> tuple[Tensor, Tensor]:
    """Map the draft's tokens to entries of its own vocabulary; tokens outside it become NO_TOKEN."""
    tokens, values = draft
    entry = vocab.entry[tokens.clamp_max(len(vocab.entry) - 1)]
    return entry.masked_fill((tokens == NO_TOKEN) | (entry < 0), NO_TOKEN), values


def _reordered(values: Float[Tensor, "B N F 4"], order: Int[Tensor, "B F"]) -> Float[Tensor, "B N F 4"]:
    """Reorder values along the tokens."""
    return values.gather(2, order[:, None, :, None].expand_as(values))
