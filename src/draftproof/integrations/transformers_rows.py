"""Present a speculative batch to transformers' processors and criteria as one matrix of token ids.

Rows of a speculative batch have different lengths, but transformers' matrices have one, and its processors may depend
on a row's index. So processors are always called with all rows, in order and of one length: the rows in question as
they are, the others cut or padded, and their results ignored. A processor that is a function of a row's tokens and
scores then returns the same as in plain decoding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import ROOT, Draft
from draftproof.engine.request import Session
from draftproof.models.interface import Forward

TokenIds = list[int]


@dataclass(slots=True)
class TokenMatrix:
    """The rows of a generate call, each with its left padding.

    `padding[r]` is the padding that was removed from the left of prompt r; `pad` fills up rows on the right.
    """

    sessions: Sequence[Session]
    padding: Sequence[TokenIds]
    pad: int
    device: torch.device
    _rows: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._rows = {session.id: r for r, session in enumerate(self.sessions)}

    def row_of(self, session: Session) -> int:
        return self._rows[session.id]

    def row(self, r: int) -> TokenIds:
        """Return row r as transformers would have it: padding, prompt, and the tokens generated so far."""
        return [*self.padding[r], *self.sessions[r].tokens]

    def aligned(self, texts: Mapping[int, TokenIds], width: int) -> Int[Tensor, "R T"]:
        """Return all rows at this width: those in `texts` (row → tokens) replaced, the others cut or padded."""
        rows = [texts[r] if r in texts else self.row(r) for r in range(len(self.sessions))]
        return torch.tensor([(row + [self.pad] * width)[:width] for row in rows], device=self.device)

    def padded(self) -> Int[Tensor, "R T"]:
        """Return all rows, padded on the right to the longest."""
        return self.aligned({}, max(len(self.row(r)) for r in range(len(self.sessions))))


@dataclass(frozen=True, slots=True)
class ProcessedDistributions:
    """Computes the target's distributions with transformers' processors, at every scored position of a draft.

    Each position is processed with the row's tokens and the draft tokens before it. `sampling` is applied to the
    processed scores: temperature 1, or 0 for greedy decoding.
    """

    matrix: TokenMatrix
    processors: Callable[[Tensor, Tensor], Tensor]
    sampling: SamplingParams

    def __call__(self, sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
        scores = forward.logits.to(device=self.matrix.device, dtype=torch.float32, copy=True)
        rows = [self.matrix.row_of(session) for session in sessions]
        prefixes = [DraftPrefixes(self.matrix.row(row), *_draft_of(draft, b)) for b, row in enumerate(rows)]
        for node in range(scores.shape[1]):
            texts = {b: text for b, prefix in enumerate(prefixes) if (text := prefix.at(node, scores[b])) is not None}
            for width, same_width in _by_length(texts):
                processed = self._process(
                    {rows[b]: texts[b] for b in same_width}, {rows[b]: scores[b, node] for b in same_width}, width
                )
                for b in same_width:
                    scores[b, node] = processed[rows[b]]
        return warp(scores.to(forward.logits.device), [self.sampling] * len(sessions))

    def _process(self, texts: Mapping[int, TokenIds], raw: Mapping[int, Tensor], width: int) -> Float[Tensor, "R V"]:
        """Call the processors with all rows; rows that are not in `raw` get zeros as scores."""
        like = next(iter(raw.values()))
        scores = torch.stack([raw.get(r, torch.zeros_like(like)) for r in range(len(self.matrix.sessions))])
        return self.processors(self.matrix.aligned(texts, width), scores)


@dataclass(slots=True)
class DraftPrefixes:
    """The token sequences before each scored position of one row: its text, followed by a path of its draft."""

    text: TokenIds
    tokens: list[int]
    parents: list[int]
    before: list[TokenIds | None] = field(default_factory=list)

    def at(self, node: int, scores: Float[Tensor, "J V"]) -> TokenIds | None:
        """Return the tokens before this position, or None if it is padding or cannot be reached.

        A position is unreachable if a draft token before it has probability 0; a grammar may not be able to process it.
        Call in order of position, with `scores` processed up to the position's parent.
        """
        self.before.append(self.text if node == 0 else self._after_slot(node - 1, scores))
        return self.before[node]

    def _after_slot(self, slot: int, scores: Float[Tensor, "J V"]) -> TokenIds | None:
        if slot >= len(self.tokens):
            return None
        token, parent = self.tokens[slot], self.parents[slot] + 1
        text = self.before[parent]
        return None if text is None or not bool(scores[parent, token] > -torch.inf) else [*text, token]


def apply_criteria(matrix: TokenMatrix, before: Mapping[int, int], criteria: Callable[[Tensor, Any], Tensor]) -> None:
    """Check transformers' stopping criteria after every new token, in order, and end each row at the first hit.

    `before` maps a row to the number of tokens it had before the round.
    """
    ends = {r: len(matrix.row(r)) for r in before}
    starts = {r: len(matrix.padding[r]) + n for r, n in before.items()}
    running = set(before)
    for width in range(min(starts.values()) + 1, max(ends.values()) + 1):
        checked = [r for r in running if starts[r] < width <= ends[r]]
        if not checked:
            continue
        done = criteria(matrix.aligned({r: matrix.row(r)[:width] for r in checked}, width), None)
        for r in checked:
            if bool(done[r]):
                del matrix.sessions[r].tokens[width - len(matrix.padding[r]) :]
                matrix.sessions[r].finish_reason = "stop"
                running.discard(r)


def _draft_of(draft: Draft, b: int) -> tuple[list[int], list[int]]:
    """Return the draft tokens of row b and their parents."""
    length = int(draft.lengths[b])
    tokens = draft.tokens[b, :length].tolist()
    if draft.parents is None:
        return tokens, list(range(ROOT, length - 1))
    return tokens, draft.parents[b, :length].tolist()


def _by_length(texts: Mapping[int, TokenIds]) -> Iterator[tuple[int, list[int]]]:
    """Group texts of equal length: yield the length and the keys."""
    for width in sorted({len(text) for text in texts.values()}):
        yield width, [b for b, text in texts.items() if len(text) == width]
