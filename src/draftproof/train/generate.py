"""Many texts at once from one target, all rows at the same position: no padding, and no waiting for the device."""

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
"""Where the target chooses the token."""

USER_TEMPERATURE: Final = 0.9
"""Of the questions that the target asks itself."""

COLDEST: Final = 1e-3
"""What temperature 0 is here: data need not break ties in one way."""

MIN_P: Final = 0.03
"""Of the rows between greedy and temperature 1."""

HEED: Final = 16
"""Positions between two looks at the clock, which on a GPU wait for all that was launched."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What a target said. `spoken`: the tokens that it drew as an answer, which are those a drafter has to guess."""

    tokens: Int[Tensor, "B T"]
    spoken: Bool[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, rows: Int[Tensor, " n"]) -> "Texts":
        """Some of them, in this order."""
        return Texts(self.tokens[rows], self.spoken[rows])


@dataclass(frozen=True, slots=True)
class Start:
    """How a row begins: its tokens, whether the assistant speaks next, and at which temperature it does."""

    tokens: tuple[int, ...]
    answers: bool
    temperature: float


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers dispatches on this class
    """Keys and values written into room that was made at the start: growing them would copy all at every token."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room, self._used = room, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._all_keys, self._all_values = (
            states.new_empty(*states.shape[:2], self._room, states.shape[3]) for states in (key_states, value_states)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, self._used = self._used, self._used + key_states.shape[2]
        self._all_keys[:, :, first : self._used] = key_states
        self._all_values[:, :, first : self._used] = value_states
        self.keys, self.values = self._all_keys[:, :, : self._used], self._all_values[:, :, : self._used]
        return self.keys, self.values


@torch.inference_mode()
def converse(
    model: PreTrainedModel,
    turns: Turns,
    starts: Sequence[Start],
    length: int,
    generator: torch.Generator,
    *,
    ends: Sequence[int] = (),
    go_on: Callable[[int], bool] = lambda position: True,
) -> Texts:
    """Texts of `length` tokens; shorter ones, all alike, if `go_on(position)` says no on the way."""
    rows = _Rows.of(starts, turns, length, model.device, ends)
    cache = TransformersCache(layers=[RoomyLayer(length) for _ in range(cached_layers(decoder_config(model)))])
    tokens = [rows.forced[:, 0]]
    spoken = [torch.zeros_like(rows.answering)]
    for position in range(1, length):
        if position % HEED == 0 and not go_on(position):
            break
        logits = model(input_ids=tokens[-1][:, None], past_key_values=cache, use_cache=True).logits[:, -1]
        token, drawn = rows.next(position, logits, generator)
        tokens.append(token)
        spoken.append(drawn)
    return Texts(torch.stack(tokens, 1).to("cpu", torch.int32), torch.stack(spoken, 1).cpu())


@dataclass(slots=True)
class _Rows:
    """Who speaks in each row, and which tokens are not the target's to choose."""

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
        room = length + 1 + max(len(turns.to_assistant), len(turns.to_user))
        forced = torch.full((len(starts), room), FREE, dtype=torch.long)
        for row, start in enumerate(starts):
            cut = start.tokens[:length]
            forced[row, : len(cut)] = torch.tensor(cut)
        every_end = {*ends, *turns.to_assistant[:1], *turns.to_user[:1]} if turns.is_chat else set()
        return cls(
            forced.to(device),
            torch.tensor([start.answers for start in starts], device=device),
            torch.tensor([start.temperature for start in starts], dtype=torch.float32, device=device),
            torch.tensor(sorted(every_end), dtype=torch.long, device=device),
            *(torch.tensor(part[1:], dtype=torch.long, device=device) for part in (turns.to_assistant, turns.to_user)),
        )

    def next(
        self, position: int, logits: Float[Tensor, "B V"], generator: torch.Generator
    ) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
        """The tokens at this position, and which of them the assistant drew; turns change behind an end."""
        temperature = self.temperature.where(self.answering, torch.full_like(self.temperature, USER_TEMPERATURE))
        forced = self.forced[:, position]
        free = forced == FREE
        token = draw(logits, temperature, generator).where(free, forced)
        drawn = self.answering & free
        ended = free & torch.isin(token, self.ends)
        self._change(position + 1, ended & ~self.answering, self.to_assistant)
        self._change(position + 1, ended & self.answering, self.to_user)
        self.answering = self.answering ^ ended
        return token, drawn

    def _change(self, at: int, which: Bool[Tensor, " B"], words: Int[Tensor, " n"]) -> None:
        place = self.forced[:, at : at + len(words)]
        place.copy_(words[: place.shape[1]].where(which[:, None], place))


def draw(
    logits: Float[Tensor, "B V"], temperature: Float[Tensor, " B"], generator: torch.Generator
) -> Int[Tensor, " B"]:
    """One token a row by an exponential race; tokens far below the likeliest fall out where it is cool."""
    probs = (logits.float() / temperature.clamp(min=COLDEST)[:, None]).softmax(-1)
    floor = torch.where(temperature < USER_TEMPERATURE, MIN_P, 0.0)[:, None] * probs.amax(-1, keepdim=True)
    probs.masked_fill_(probs < floor, 0)
    race = torch.empty_like(probs).exponential_(generator=generator).clamp_(min=torch.finfo(torch.float32).tiny)
    return probs.div_(race).argmax(-1)
