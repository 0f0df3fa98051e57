"""The batch as transformers sees it: one matrix of token ids, for processors and criteria that want one.

Our rows have different lengths; transformers' have one, and its processors may go by the row's index. So they are
always called with all rows, in order and of one length: those that are asked about as they are, the others cut or
padded to it, and what is said about those others is not looked at. A processor that is a function of a row's tokens
and scores says the same as in plain decoding.
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

Text = list[int]


@dataclass(slots=True)
class Sheet:
    """`padding[r]` is what stood to the left of row r's prompt and was taken off; `pad` fills up on the right."""

    sessions: Sequence[Session]
    padding: Sequence[Text]
    pad: int
    device: torch.device
    _rows: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._rows = {session.id: r for r, session in enumerate(self.sessions)}

    def row(self, session: Session) -> int:
        return self._rows[session.id]

    def text(self, row: int) -> Text:
        """The row as transformers would have it by now."""
        return [*self.padding[row], *self.sessions[row].tokens]

    def aligned(self, texts: Mapping[int, Text], width: int) -> Int[Tensor, "R T"]:
        """These texts, all `width` long, in their rows; the other rows cut or padded to it."""
        rows = [texts[r] if r in texts else self.text(r) for r in range(len(self.sessions))]
        return torch.tensor([(row + [self.pad] * width)[:width] for row in rows], device=self.device)

    def matrix(self) -> Int[Tensor, "R T"]:
        """All rows, padded on the right."""
        return self.aligned({}, max(len(self.text(r)) for r in range(len(self.sessions))))


@dataclass(frozen=True, slots=True)
class Processed:
    """The target's distributions by transformers' processors: asked at every scored position, with the draft before it behind
    the row's tokens. `sampling` draws from what they leave, or takes its argmax."""

    sheet: Sheet
    processors: Callable[[Tensor, Tensor], Tensor]
    sampling: SamplingParams

    def __call__(self, sessions: Sequence[Session], forward: Forward, draft: Draft) -> Distribution:
        scores = forward.logits.to(device=self.sheet.device, dtype=torch.float32, copy=True)
        rows = [self.sheet.row(session) for session in sessions]
        lines = [Line(self.sheet.text(row), *_slots(draft, b)) for b, row in enumerate(rows)]
        for node in range(scores.shape[1]):
            texts = {b: text for b, line in enumerate(lines) if (text := line.at(node, scores[b])) is not None}
            for width, some in _by_length(texts):
                answers = self._ask({rows[b]: texts[b] for b in some}, {rows[b]: scores[b, node] for b in some}, width)
                for b in some:
                    scores[b, node] = answers[rows[b]]
        return warp(scores.to(forward.logits.device), [self.sampling] * len(sessions))

    def _ask(self, texts: Mapping[int, Text], raw: Mapping[int, Tensor], width: int) -> Float[Tensor, "R V"]:
        some = next(iter(raw.values()))
        scores = torch.stack([raw.get(r, torch.zeros_like(some)) for r in range(len(self.sheet.sessions))])
        return self.processors(self.sheet.aligned(texts, width), scores)


@dataclass(slots=True)
class Line:
    """One row's text and draft: what stands before each scored position, as far as it can be said at all."""

    text: Text
    tokens: list[int]
    parents: list[int]
    before: list[Text | None] = field(default_factory=list)

    def at(self, node: int, scores: Float[Tensor, "J V"]) -> Text | None:
        """The text before this position; None where there is none, or where a token before it has no probability:
        such a position is never reached, and a grammar need not know what to say there. Asked in order; `scores` are
        processed up to the position's parent."""
        self.before.append(self.text if node == 0 else self._behind(node - 1, scores))
        return self.before[node]

    def _behind(self, slot: int, scores: Float[Tensor, "J V"]) -> Text | None:
        if slot >= len(self.tokens):
            return None
        token, above = self.tokens[slot], self.parents[slot] + 1
        text = self.before[above]
        return None if text is None or not bool(scores[above, token] > -torch.inf) else [*text, token]


def _slots(draft: Draft, b: int) -> tuple[list[int], list[int]]:
    """Row b's drafted tokens and their parents."""
    length = int(draft.lengths[b])
    tokens = draft.tokens[b, :length].tolist()
    if draft.parents is None:
        return tokens, list(range(ROOT, length - 1))
    return tokens, draft.parents[b, :length].tolist()


def _by_length(texts: Mapping[int, Text]) -> Iterator[tuple[int, list[int]]]:
    for width in sorted({len(text) for text in texts.values()}):
        yield width, [b for b, text in texts.items() if len(text) == width]


def cut(sheet: Sheet, before: Mapping[int, int], criteria: Callable[[Tensor, Any], Tensor]) -> None:
    """Ask transformers' criteria behind every token emitted since `before` (row → tokens it had), in order, and end
    each row behind the first that says so."""
    ends = {r: len(sheet.text(r)) for r in before}
    starts = {r: len(sheet.padding[r]) + n for r, n in before.items()}
    going = set(before)
    for width in range(min(starts.values()) + 1, max(ends.values()) + 1):
        some = [r for r in going if starts[r] < width <= ends[r]]
        if not some:
            continue
        done = criteria(sheet.aligned({r: sheet.text(r)[:width] for r in some}, width), None)
        for r in some:
            if bool(done[r]):
                del sheet.sessions[r].tokens[width - len(sheet.padding[r]) :]
                sheet.sessions[r].finish_reason = "stop"
                going.discard(r)
