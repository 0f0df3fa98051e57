"""Draft with a model that has another tokenizer, by string-level exact match (SLEM).

After Timor et al. 2025, arXiv 2502.05202. The draft model continues the text greedily in its own tokens, and the
target's tokenizer encodes what it wrote. These tokens are chosen and not drawn, so every rule is exact for them; a
target that samples accepts fewer of them than of drawn ones.
"""

from collections.abc import Sequence
from typing import Final

from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.reencode import LONGEST_WORD, Reencoder, begins_word, spelled
from draftproof.models.interface import Model
from draftproof.models.vocabulary_overlap import VocabularyOverlap

GREEDY: Final = SamplingParams(temperature=0)


class SLEM:
    """Drafter that lets a model with another vocabulary write text, and encodes the text for the target.

    greedy_only  refuse requests that sample, with the overlap of the vocabularies: few of the tokens would be accepted
    """

    def __init__(self, model: Model, overlap: VocabularyOverlap, *, greedy_only: bool = False) -> None:
        self._model, self._overlap, self._greedy_only = model, overlap, greedy_only
        self._drafter = ModelDrafter(model)
        self._reencode = Reencoder(overlap)
        self._target_of = {draft: target for target, draft in overlap.partner.items()}

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse a request that samples, if `greedy_only`."""
        if self._greedy_only and sampling.temperature > 0:
            raise ValueError(
                f"the draft model has {self._overlap}, too few to draw drafts from at temperature "
                f'{sampling.temperature:g}: ask for temperature=0, or choose drafter="slem:MODEL" or "tli:MODEL" (both '
                "exact, and rarely accepted), or use a drafter with the target's vocabulary"
            )

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] chosen tokens for each row; see `Drafter`."""
        draft = self._drafter.propose(self._reencode(contexts, self._drafter.truncate, GREEDY), k, rng)
        rows = zip(contexts, draft.tokens.tolist(), draft.lengths.tolist(), k, strict=True)
        guesses = [self._guess(context.tokens, written[:n], most) for context, written, n, most in rows]
        return chosen([Guess(guess, list(range(-1, len(guess) - 1))) for guess in guesses], rng.seeds.device)

    def _guess(self, tokens: Sequence[int], written: list[int], most: int) -> list[int]:
        """Return up to `most` tokens of the target for the draft tokens written after its own."""
        ordinary = next((i for i, token in enumerate(written) if token in self._overlap.draft.special), len(written))
        guess = self._encoded(tokens, spelled(self._overlap.draft, written[:ordinary]))
        special = [self._target_of[token] for token in written[ordinary : ordinary + 1] if token in self._target_of]
        return (guess + special)[:most]

    def _encoded(self, tokens: Sequence[int], text: bytes) -> list[int]:
        """Encode text that follows these tokens, together with their last word if that keeps its tokens, else alone."""
        target = self._overlap.target
        word = self._last_word(tokens)
        together = target.encode(spelled(target, word) + text)
        if together[: len(word)] == word:
            return together[len(word) :]
        return target.encode(text)

    def _last_word(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the last word."""
        target, first = self._overlap.target, max(0, len(tokens) - LONGEST_WORD)
        starts = (i for i in range(len(tokens) - 1, first, -1) if begins_word(target, tokens[i - 1], tokens[i]))
        return list(tokens[next(starts, first) :])
