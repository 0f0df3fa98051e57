"""What a head on the target's states would draft behind every token of a text, recomputed from the text alone.

A text does not tell the states that the head went on with inside a draft, so the law of a round's first token is taken
everywhere. Any function of the tokens before a position is a valid bet, and this one is near what was drawn from.
"""

from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.audit.teacher import Teacher, fingerprint
from draftproof.models.fitted import SHIPPED, FittedHead, fitted

NAMES: Final = ("head", "suffix+head")
"""Drafters that draw from a head; behind a colon stands its folder."""


class HeadTeacher(Teacher):
    """A head as a teacher of its own law: 0 outside its vocabulary, warped as any other by the judge's processors.

    At position t − 2 the head reads the target's states there and the token x_{t−1}, and predicts x_t. The target is
    read once more for its states: one pass over the text, without its output layer.
    """

    def __init__(self, head: FittedHead, target: PreTrainedModel) -> None:
        super().__init__(target)
        self._head = head
        self._vocab_size = len(head.vocab.entry)

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Behind each of the last `scored` tokens; all alike behind a text's first one, where a head has no guess."""
        head, B, n = self._head, len(tokens), tokens.shape[1] - 1
        hidden = self._pass(tokens, 1, output_hidden_states=True).hidden_states
        h = head.head.fuse([hidden[tap][:, :n].float() for tap in head.head.shape.taps])
        follow, positions = tokens[:, 1:].to(h.device), torch.arange(n, device=h.device).expand(B, n)
        made = head.head.step(head.embedded(follow), h, positions, head.head.new_cache(B, n), reach=n) if n else h
        guessed = head.logits(made[:, max(0, n - scored) :])
        logits = guessed.new_full((B, scored, self.vocab_size), -torch.inf)
        logits[..., head.vocab.ids] = torch.nn.functional.pad(guessed, (0, 0, scored - guessed.shape[1], 0))
        return logits

    def describe(self) -> dict[str, str]:
        """Which head this is: how many tokens it can say, and a hash of its weights."""
        return {"model": f"a head of {len(self._head.vocab.ids):,} tokens", "weights": fingerprint(self._head.head)}


def with_states(drafter: Any, target: Any) -> Any:
    """A head or the name of one as a `HeadTeacher` on the target; any other drafter as it is."""
    name, _, folder = drafter.partition(":") if isinstance(drafter, str) else ("", "", "")
    if name not in NAMES and not isinstance(drafter, FittedHead):
        return drafter
    if getattr(target, "config", None) is None:
        raise ValueError(f"a head reads the states of a transformers model; the target is a {type(target).__name__}")
    return HeadTeacher(fitted(folder or SHIPPED, target) if name in NAMES else drafter, target)
