"""Recompute from the text the distribution that a drafter draws from, or recognise a drafter that copies.

A draft model, a head, a draft model with another tokenizer, or a function of the preceding tokens can be recomputed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.auditor.reference import ReferenceModel, TargetDistributions, fingerprint, in_use
from draftproof.core.sampling import SamplingParams
from draftproof.models.head.attach import SHIPPED, fitted
from draftproof.models.head.attach_published import fitted_eagle3, fitted_mtp
from draftproof.models.head.network import FittedHead

DistributionOf = Callable[[Sequence[int]], Float[Tensor, " V"]]
"""A drafter's distribution of the next token, given all tokens before it."""

COPYING: Final = ("ngram", "suffix", "prompt-lookup")
"""Names of drafters that copy from the text. Any other name does not determine a distribution, and bets on copied text
would not find a skipped residual."""

HEAD_NAMES: Final = ("head", "suffix+head", "eagle3", "mtp")
"""Names of drafters that draw from a head; the head's folder may follow after a colon."""


@dataclass(frozen=True)
class Drafted:
    """A drafter's log-probabilities at N positions, over the target's vocabulary.

    `log_raw` is without the sampling parameters; None if that is the same, or unknown.
    """

    log_q: Float[Tensor, "N V"]
    log_raw: Float[Tensor, "N V"] | None = None

    @cached_property
    def q(self) -> Float[Tensor, "N V"]:
        return self.log_q.exp()

    @classmethod
    def by(
        cls, drafter: ReferenceModel | DistributionOf, dists: TargetDistributions, sampling: SamplingParams
    ) -> "Drafted":
        """Compute the drafter's distributions at the positions of the target's."""
        positions = dists.positions
        if isinstance(drafter, ReferenceModel):
            own = drafter.dists(positions, sampling)
            raw = _fitted(own.scores.log_softmax(-1), dists) if in_use(sampling) else None
            return cls(_fitted(own.log_p, dists), raw)
        rows = zip(positions.before.tolist(), positions.length.tolist(), strict=True)
        return cls(_fitted(torch.stack([drafter(row[:n]) for row, n in rows]).log(), dists))


def _fitted(log_q: Float[Tensor, "N U"], dists: TargetDistributions) -> Float[Tensor, "N V"]:
    """Fit to the target's vocabulary: tokens the drafter lacks get −inf, tokens the target lacks are dropped."""
    V = dists.log_p.shape[-1]
    wide = torch.nn.functional.pad(log_q[:, :V], (0, max(0, V - log_q.shape[1])), value=-torch.inf)
    return wide.to(dists.log_p)


def copies_text(drafter: Any) -> bool:
    """Return whether a drafter of this name copies from the text, always or when it can."""
    return isinstance(drafter, str) and drafter.split("+")[0] in COPYING


def as_drafter(drafter: Any) -> ReferenceModel | DistributionOf | None:
    """Return what computes a drafter's distribution, or None for a drafter that is unknown or copies from the text.

    `drafter` is a draft model, its `ReferenceModel`, a function from the preceding tokens to a distribution, the name
    of a copying drafter, or None.
    """
    if drafter is None or isinstance(drafter, ReferenceModel):
        return drafter
    if isinstance(drafter, str) and drafter in COPYING:
        return None
    if getattr(drafter, "config", None) is not None or hasattr(drafter, "new_cache"):
        return ReferenceModel(drafter)
    if callable(drafter):
        dist: DistributionOf = drafter
        return dist
    close = get_close_matches(drafter, (*COPYING, *HEAD_NAMES), n=1) if isinstance(drafter, str) else []
    raise ValueError(
        "drafter must be a draft model, a head, a function from tokens to a distribution, the name of one that copies "
        f"({', '.join(COPYING)}), or None; got {drafter!r:.80}" + (f"; did you mean {close[0]!r}?" if close else "")
    )


def resolve_head(drafter: Any, target: Any) -> Any:
    """Turn a head, or the name of one, into a `HeadReference` on the target; return any other drafter unchanged."""
    name, _, folder = drafter.partition(":") if isinstance(drafter, str) else ("", "", "")
    if name not in HEAD_NAMES and not isinstance(drafter, FittedHead):
        return drafter
    if getattr(target, "config", None) is None:
        raise ValueError(f"a head reads the states of a transformers model; the target is a {type(target).__name__}")
    if name == "eagle3":
        drafter = fitted_eagle3(folder, target)
    elif name == "mtp":
        drafter = fitted_mtp(folder, target)
    elif name in HEAD_NAMES:
        drafter = fitted(folder or SHIPPED, target)
    return HeadReference(drafter, target)


class HeadReference(ReferenceModel):
    """The reference distribution of a draft head: 0 outside its vocabulary, after the same processors as the target's.

    At position t − 2 the head reads the target's hidden states and the token x_{t−1}, and predicts x_t. The target runs
    once more for its hidden states: one pass over the text, with logits of the last position only.
    """

    def __init__(self, head: FittedHead, target: PreTrainedModel) -> None:
        super().__init__(target)
        self._head = head
        self._vocab_size = len(head.vocab.entry)

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Return logits after the last `scored` tokens; uniform after the first, where a head has no input."""
        head, B, n = self._head, len(tokens), tokens.shape[1] - 1
        hidden = self._pass(tokens, 1, output_hidden_states=True).hidden_states
        h = head.head.fuse([hidden[tap][:, :n].to(head.dtype) for tap in head.head.taps])
        follow, positions = tokens[:, 1:].to(h.device), torch.arange(n, device=h.device).expand(B, n)
        states = head.head.step(head.embedded(follow), h, positions, head.head.new_cache(B, n), reach=n) if n else h
        guessed = head.logits(states[:, max(0, n - scored) :])
        logits = guessed.new_full((B, scored, self.vocab_size), -torch.inf)
        logits[..., head.vocab.ids] = torch.nn.functional.pad(guessed, (0, 0, scored - guessed.shape[1], 0))
        return logits

    def describe(self) -> dict[str, str]:
        """Identify the head for a certificate: its vocabulary size and a hash of its weights."""
        return {"model": f"a head of {len(self._head.vocab.ids):,} tokens", "weights": fingerprint(self._head.head)}


class TranslatedReference(ReferenceModel):
    """The reference distribution of a draft model with another tokenizer, over the words that both vocabularies have.

    The text before a position is decoded, and encoded with the draft model's tokenizer. Where a decoder translates
    differently the bets are weaker, but no less fair. `vocab_size` is the target's.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, model_tokenizer: Any, vocab_size: int) -> None:
        super().__init__(model)
        self._tokenizer, self._model_tokenizer = tokenizer, model_tokenizer
        self._vocab_size = vocab_size
        shared = shared_words(tokenizer, model_tokenizer)
        if not shared:
            raise ValueError("the tokenizers of target and draft model have no word in common: nothing can be drafted")
        self._target_ids, self._model_ids = (torch.tensor(ids) for ids in zip(*sorted(shared.items()), strict=True))

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Return logits after the last `scored` tokens; −inf for words that the draft model lacks."""
        lengths = range(tokens.shape[1] - scored + 1, tokens.shape[1] + 1)
        texts = self._tokenizer.batch_decode(
            [row[:n] for row in tokens.tolist() for n in lengths],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=True,
        )
        contexts = [tuple(ids) for ids in self._model_tokenizer(texts, add_special_tokens=False)["input_ids"]]
        rows = self._shared_logits(contexts)
        logits = torch.full((len(contexts), self.vocab_size), -torch.inf)
        logits[:, self._target_ids] = torch.stack([rows[context] for context in contexts])
        return logits.view(len(tokens), scored, self.vocab_size)

    def _shared_logits(self, contexts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Float[Tensor, " W"]]:
        """Return the logits of the shared words after each context; uniform after an empty one.

        In sorted order a context comes right before its continuations. Read backwards, one pass over the longest of
        them serves all contexts that it begins with.
        """
        rows: dict[tuple[int, ...], Tensor] = {(): torch.zeros(len(self._model_ids))}
        longest: tuple[int, ...] = ()
        for context in sorted(set(contexts) - {()}, reverse=True):
            if longest[: len(context)] != context:
                longest = context
                table = self._pass(torch.tensor([longest]), len(longest)).logits[0].float().cpu()
            rows[context] = table[len(context) - 1, self._model_ids]
        return rows


def shared_words(tokenizer: Any, other: Any) -> dict[int, int]:
    """Map ids of the first vocabulary to ids of the other, for words spelled alike up to the sign of a space."""
    words, space, other_space = tokenizer.get_vocab(), _space_sign(tokenizer), _space_sign(other)
    shared = {}
    for word, i in other.get_vocab().items():
        alike = space + word[1:] if space and other_space and word.startswith(other_space) else word
        if alike in words:
            shared[words[alike]] = i
    return shared


def _space_sign(tokenizer: Any) -> str:
    """Return the first character of the token of a space; empty if a space has no token."""
    ids = tokenizer(" ", add_special_tokens=False)["input_ids"]
    return str(tokenizer.convert_ids_to_tokens(ids)[0][0]) if ids else ""
