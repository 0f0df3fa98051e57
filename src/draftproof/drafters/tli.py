"""Draft with a model that has another tokenizer, by token-level intersection (TLI).

After Timor et al. 2025, arXiv 2502.05202. The draft model's logits are restricted to the tokens that both vocabularies
have, *before* temperature and filters. A token is drawn from what remains, and the draft carries exactly that
distribution. Logits and ids are rearranged by one table: with two, the declared distribution could be a permutation of
the one that was drawn from.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.interface import Context
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.reencode import Reencoder
from draftproof.models.interface import Cache, Forward, Model
from draftproof.models.vocabulary_overlap import VocabularyOverlap


class TLI:
    """Drafter that draws from a model with another vocabulary, among the tokens that both have.

    vocab_size   the number of the target's logits
    temperature, confidence, branches   as in `ModelDrafter`
    """

    def __init__(
        self,
        model: Model,
        overlap: VocabularyOverlap,
        *,
        vocab_size: int,
        temperature: float | None = None,
        confidence: float = 0.0,
        branches: int = 1,
    ) -> None:
        if len(overlap.partner) < branches:
            raise ValueError(
                f"the draft model has {overlap}, and branches={branches} needs as many: use a drafter with the "
                "target's vocabulary"
            )
        self._model, self._overlap = model, overlap
        self._options: dict[str, Any] = {"temperature": temperature, "confidence": confidence, "branches": branches}
        self._seen = SharedTokens(model, overlap, vocab_size)
        self._drafter = ModelDrafter(self._seen, vocab_size=vocab_size, **self._options)
        self._reencode = Reencoder(overlap, self._seen.id_of)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`."""
        return self._drafter.propose(self._reencode(contexts, self._drafter.truncate), k, rng)


class SharedTokens:
    """A draft model as seen from the target's vocabulary.

    Ids below `target_size` are the target's tokens; ids from there on are the draft model's own tokens, which a context
    may hold. Only shared tokens have logits; those of all others are −inf.
    """

    def __init__(self, model: Model, overlap: VocabularyOverlap, target_size: int) -> None:
        self._model = model
        self.target_size = target_size
        shared = sorted(overlap.partner.items())
        self._target_of = {draft: target for target, draft in shared}
        if len(self._target_of) < len(shared):
            raise ValueError("the overlap gives two tokens of the target the same draft token; it must be one to one")
        targets, drafts = (torch.tensor(ids, device=model.device) for ids in zip(*shared, strict=True))
        self._source = torch.full((target_size,), model.vocab_size, device=model.device).index_copy_(0, targets, drafts)
        own = torch.arange(model.vocab_size, device=model.device)
        self._draft_id = torch.cat([torch.zeros_like(self._source).index_copy_(0, targets, drafts), own])

    @property
    def vocab_size(self) -> int:
        return self.target_size + self._model.vocab_size

    @property
    def max_length(self) -> int | None:
        return self._model.max_length

    @property
    def device(self) -> torch.device:
        return self._model.device

    def id_of(self, draft_token: int) -> int:
        """Return the id of a draft token: the target's if it is shared, else one of its own."""
        return self._target_of.get(draft_token, self.target_size + draft_token)

    def new_cache(self, rows: int, capacity: int = 0) -> Cache:
        return self._model.new_cache(rows, capacity)

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` over the target's vocabulary; see `Model`."""
        made = self._model(self._draft_id[tokens], cache, parents=parents, scored=scored, layers=layers)
        padded = torch.nn.functional.pad(made.logits, (0, 1), value=-torch.inf)  # the source of tokens not shared
        return Forward(padded.index_select(-1, self._source), made.hidden)
