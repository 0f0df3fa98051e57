"""Generate many texts at once from one target, all rows at the same position: no padding and no device sync."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer

from draftproof.models.compatibility import cached_layers, decoder_config
from draftproof.train.chat_template import Turns

FREE: Final = -1
"""Marks a position whose token the target samples; other positions hold a forced token."""

USER_TEMPERATURE: Final = 0.9
"""Temperature of the user messages, which the target generates too."""

MIN_TEMPERATURE: Final = 1e-3
"""Temperature used in place of 0: training texts need no particular way to break ties."""

MIN_P: Final = 0.03
"""min-p filter of rows colder than `USER_TEMPERATURE`."""

CHECK_EVERY: Final = 16
"""Positions between two checks of the time, each of which synchronises with a GPU."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that a target generated. `is_answer` marks the tokens it sampled as the assistant: those to be drafted."""

    tokens: Int[Tensor, "B T"]
    is_answer: Bool[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Int[Tensor, " n"]) -> "Texts":
        """Return the texts of these rows, in this order."""
        return Texts(self.tokens[rows], self.is_answer[rows])


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a text: its tokens, whether the assistant continues it, and the answers' temperature."""

    tokens: tuple[int, ...]
    assistant_next: bool
    temperature: float


@torch.inference_mode()
def generate_texts(
    model: PreTrainedModel,
    turns: Turns,
    starts: Sequence[Start],
    length: int,
    generator: torch.Generator,
    *,
    ends: Sequence[int] = (),
    go_on: Callable[[int], bool] = lambda position: True,
) -> Texts:
    """Generate texts of `length` tokens, or shorter ones of equal length if `go_on(position)` returns False."""
    rows = _Rows.of(starts, turns, length, model.device, ends)
    cache = TransformersCache(layers=[PreallocatedLayer(length) for _ in range(cached_layers(decoder_config(model)))])
    tokens = [rows.forced[:, 0]]
    is_answer = [torch.zeros_like(rows.answering)]
    for position in range(1, length):
        if position % CHECK_EVERY == 0 and not go_on(position):
            break
        logits = model(input_ids=tokens[-1][:, None], past_key_values=cache, use_cache=True).logits[:, -1]
        token, answered = rows.next(position, logits, generator)
        tokens.append(token)
        is_answer.append(answered)
    return Texts(torch.stack(tokens, 1).to("cpu", torch.int32), torch.stack(is_answer, 1).cpu())


def sample_tokens(
    logits: Float[Tensor, "B V"], temperature: Float[Tensor, " B"], generator: torch.Generator
) -> Int[Tensor, " B"]:
    """Sample one token per row by an exponential race, with a min-p filter on cold rows."""
    probs = (logits.float() / temperature.clamp(min=MIN_TEMPERATURE)[:, None]).softmax(-1)
    floor = torch.where(temperature < USER_TEMPERATURE, MIN_P, 0.0)[:, None] * probs.amax(-1, keepdim=True)
    probs.masked_fill_(probs < floor, 0)
    race = torch.empty_like(probs).exponential_(generator=generator).clamp_(min=torch.finfo(torch.float32).tiny)
    return probs.div_(race).argmax(-1)


@dataclass(slots=True)
class _Rows:
    """The state of each row: whether the assistant is answering, and which coming tokens are forced."""

    forced: Int[Tensor, "B P"]
    answering: Bool[Tensor, " B"]
    temperature: Float[Tensor, " B"]
    ends: Int[Tensor, " E"]
    to_assistant: Int[Tensor, " a"]
    to_user: Int[Tensor, " u"]

    @classmethod
    def of(
        cls, starts: Sequence[Start], turns: Turns, length: int, device: torch.device, ends: Sequence[int]
    ) -> "_Rows":
        width = length + 1 + max(len(turns.to_assistant), len(turns.to_user))
        forced = torch.full((len(starts), width), FREE, dtype=torch.long)
        for row, start in enumerate(starts):
            tokens = start.tokens[:length]
            forced[row, : len(tokens)] = torch.tensor(tokens)
        all_ends = {*ends, *turns.to_assistant[:1], *turns.to_user[:1]} if turns.is_chat else set()
        return cls(
            forced.to(device),
            torch.tensor([start.assistant_next for start in starts], device=device),
            torch.tensor([start.temperature for start in starts], dtype=torch.float32, device=device),
            torch.tensor(sorted(all_ends), dtype=torch.long, device=device),
            *(torch.tensor(part[1:], dtype=torch.long, device=device) for part in (turns.to_assistant, turns.to_user)),
        )

    def next(
        self, position: int, logits: Float[Tensor, "B V"], generator: torch.Generator
    ) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
        """Return the tokens at this position and a mask of those sampled as an answer; change turns after an end."""
        temperature = self.temperature.where(self.answering, torch.full_like(self.temperature, USER_TEMPERATURE))
        forced = self.forced[:, position]
        free = forced == FREE
        token = sample_tokens(logits, temperature, generator).where(free, forced)
        answered = self.answering & free
        ended = free & torch.isin(token, self.ends)
        self._force(position + 1, ended & ~self.answering, self.to_assistant)
        self._force(position + 1, ended & self.answering, self.to_user)
        self.answering = self.answering ^ ended
        return token, answered

    def _force(self, position: int, rows: Bool[Tensor, " B"], tokens: Int[Tensor, " n"]) -> None:
        """Force these tokens from `position` on, in the rows of this mask."""
        span = self.forced[:, position : position + len(tokens)]
        span.copy_(tokens[: span.shape[1]].where(rows[:, None], span))


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers dispatches on this class
    """A cache layer allocated at its full length: a growing one would copy all keys and values at every token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._used = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._all_keys, self._all_values = (
            states.new_empty(*states.shape[:2], self._length, states.shape[3]) for states in (key_states, value_states)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, self._used = self._used, self._used + key_states.shape[2]
        self._all_keys[:, :, first : self._used] = key_states
        self._all_values[:, :, first : self._used] = value_states
        self.keys, self.values = self._all_keys[:, :, : self._used], self._all_values[:, :, : self._used]
        return self.keys, self.values
