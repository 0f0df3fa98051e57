"""Apply vLLM's logits processors to every row that a verification reads, as its plain sampler would.

Rows of a request are adjacent: row j follows draft token j − 1, and the last one follows the whole draft. A row's
history therefore includes the draft tokens before it. The order is the plain sampler's: allowed tokens, bad words,
minimum length, bias, penalties; then temperature, min-p, top-k, top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.sampling import GREEDY_BELOW

History = Sequence[int]


@dataclass(frozen=True)
class Layout:
    """Where the rows of each request are, from the number of its draft tokens."""

    drafted: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first row of each request."""
        starts, row = [], 0
        for count in self.drafted:
            starts.append(row)
            row += count + 1
        return tuple(starts)

    @property
    def longest(self) -> int:
        return max(self.drafted, default=0)

    @property
    def even(self) -> bool:
        """Return whether all drafts have the same length: rows are then a dense [B, K + 1] array."""
        return min(self.drafted, default=0) == self.longest

    def owners(self, device: torch.device) -> Int[Tensor, " N"]:
        """Return each row's request."""
        return to_device([b for b, count in enumerate(self.drafted) for _ in range(count + 1)], device)

    def padded(self, rows: Float[Tensor, "N V"]) -> Float[Tensor, "B J V"]:
        """Return rows as [B, K + 1, V]; short requests repeat their last row. A dense array is not copied."""
        B, J = len(self.drafted), self.longest + 1
        if self.even:
            return rows.view(B, J, -1)
        places = zip(self.starts, self.drafted, strict=True)
        index = [start + min(j, count) for start, count in places for j in range(J)]
        return rows.index_select(0, to_device(index, rows.device)).view(B, J, -1)

    def padded_drafts(self, rows: Float[Tensor, "M V"]) -> Float[Tensor, "B K V"]:
        """Return one row per draft token as [B, K, V]; what is after a draft's end repeats another row."""
        B, K = len(self.drafted), self.longest
        if self.even:
            return rows.view(B, K, -1)
        firsts = [start - b for b, start in enumerate(self.starts)]
        places = zip(firsts, self.drafted, strict=True)
        index = [min(first + min(k, max(count - 1, 0)), len(rows) - 1) for first, count in places for k in range(K)]
        return rows.index_select(0, to_device(index, rows.device)).view(B, K, -1)

    def padded_tokens(self, tokens: Int[Tensor, " M"]) -> Int[Tensor, "B K"]:
        """Return draft tokens as [B, K], -1 after the end of a draft."""
        B, K = len(self.drafted), self.longest
        if self.even:
            return tokens.long().view(B, K)
        there = torch.arange(K) < torch.tensor(self.drafted)[:, None]
        place = there.flatten().nonzero()[:, 0].to(tokens.device, non_blocking=True)
        padded = torch.full((B * K,), -1, dtype=torch.int64, device=tokens.device)
        return padded.index_copy_(0, place, tokens.long()).view(B, K)


def needs_history(sampling: Any) -> bool:
    """Return whether the logits depend on the draft tokens before a row."""
    return not sampling.no_penalties or bool(sampling.bad_words_token_ids)


def processed(logits: Float[Tensor, "N V"], layout: Layout, drafts: Sequence[History], sampling: Any) -> Tensor:
    """Return float32 logits as the plain sampler has them before the temperature; a copy where anything changes."""
    biases = _state(sampling, "LogitBiasLogitsProcessor", "biases")
    min_tokens = _state(sampling, "MinTokensLogitsProcessor", "min_toks")
    mask = sampling.allowed_token_ids_mask
    if not (biases or min_tokens or mask is not None or needs_history(sampling)):
        return logits.float()
    logits = logits.to(torch.float32, copy=True)
    if mask is not None:
        logits.masked_fill_(mask[layout.owners(logits.device)], -torch.inf)
    for b, words in (sampling.bad_words_token_ids or {}).items():
        _forbid_bad_words(_rows_of(logits, layout, b), words, list(sampling.output_token_ids[b]), drafts[b])
    for b, (least, output, stops, *structured) in min_tokens.items():
        short = max(0, least - len(output))
        _forbid_stops(_rows_of(logits, layout, b)[:short], sorted(stops), any(structured))
    for b, bias in biases.items():
        rows = _rows_of(logits, layout, b)
        rows[:, to_device(list(bias), rows.device)] += to_device(list(bias.values()), rows.device, torch.float32)
    return logits if sampling.no_penalties else _penalised(logits, layout, drafts, sampling)


def _state(sampling: Any, processor: str, name: str) -> dict[int, Any]:
    """Return the per-request state of one of vLLM's logits processors; empty if there is no such processor."""
    for each in sampling.logitsprocs.non_argmax_invariant:
        if type(each).__name__ == processor:
            state: dict[int, Any] = getattr(each, name)
            return state
    return {}


def _rows_of(logits: Float[Tensor, "N V"], layout: Layout, b: int) -> Float[Tensor, "J V"]:
    return logits[layout.starts[b] : layout.starts[b] + layout.drafted[b] + 1]


def _forbid_bad_words(rows: Float[Tensor, "J V"], words: Sequence[History], output: list[int], draft: History) -> None:
    """Forbid the last token of each bad word whose other tokens end a row's history."""
    for j, row in enumerate(rows):
        history = [*output, *draft[:j]]
        for *head, last in words:
            if not head or history[-len(head) :] == head:
                row[last : last + 1] = -torch.inf


def _forbid_stops(rows: Float[Tensor, "J V"], stops: list[int], structured: bool) -> None:
    """Forbid the stop tokens; under a grammar, not where nothing else is possible."""
    if not stops or not len(rows):
        return
    before = rows[:, stops]
    rows[:, stops] = -torch.inf
    if structured:
        nothing_left = (rows.amax(-1) == -torch.inf)[:, None]
        rows[:, stops] = torch.where(nothing_left, before, rows[:, stops])


def _penalised(logits: Float[Tensor, "N V"], layout: Layout, drafts: Sequence[History], sampling: Any) -> Tensor:
    """Apply vLLM's penalties to each row, with the draft tokens before it counted as seen."""
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    owners = layout.owners(logits.device)
    histories = [
        [*sampling.output_token_ids[b], *drafts[b][:j]]
        for b, count in enumerate(layout.drafted)
        for j in range(count + 1)
    ]
    penalised: Tensor = apply_all_penalties(
        logits,
        sampling.prompt_token_ids[owners],
        sampling.presence_penalties[owners],
        sampling.frequency_penalties[owners],
        sampling.repetition_penalties[owners],
        histories,
    )
    return penalised


def min_p_of(sampling: Any, B: int) -> Float[Tensor, " B"] | None:
    """Return each request's min-p, or None if no request has one."""
    for each in sampling.logitsprocs.argmax_invariant:
        if type(each).__name__ == "MinPLogitsProcessor" and each.min_p_count:
            return each.min_p_device[:B]  # type: ignore[no-any-return]
    return None


def cut_by_min_p(logits: Float[Tensor, "N V"], layout: Layout, sampling: Any) -> Tensor:
    """Remove what min-p removes. vLLM does so before top-p, whose mass is then that of what is left."""
    B = len(layout.drafted)
    min_p = min_p_of(sampling, B)
    if min_p is None or sampling.temperature is None:
        return logits
    temperature = sampling.temperature[:B]
    temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    depth = (temperature * min_p.to(logits.device).log())[layout.owners(logits.device)]  # -inf where min-p is off
    return logits.masked_fill(logits < (logits.amax(-1) + depth)[:, None], -torch.inf)


def filtered(logits: Float[Tensor, "N V"], layout: Layout, sampling: Any) -> Tensor:
    """Return the scores that vLLM reports as processed: after temperature, min-p, top-k and top-p, by its own code."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    if sampling.all_greedy:
        return logits
    owners = layout.owners(logits.device)
    temperature = sampling.temperature[owners]
    logits = cut_by_min_p(logits, layout, sampling) / torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    top_k, top_p = (None if each is None else each[owners] for each in (sampling.top_k, sampling.top_p))
    scores: Tensor = apply_top_k_top_p(logits, top_k, top_p)
    return scores
