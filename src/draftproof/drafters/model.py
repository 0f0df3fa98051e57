"""Guess with a smaller model: its tokens are drawn, and the draft carries the very law they were drawn from."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftproof.core.host import sent
from draftproof.core.law import Vocab
from draftproof.core.noise import Noise
from draftproof.core.sampling import Sampling
from draftproof.core.types import Draft
from draftproof.drafters import Context
from draftproof.drafters.draws import Draws
from draftproof.drafters.guess import Guess, check_count, check_share, chosen
from draftproof.drafters.reader import Reader
from draftproof.drafters.seen import grown, seen
from draftproof.drafters.spine import Spine
from draftproof.models import Model


class ModelDrafter:
    """Drafts by a model of the target's vocabulary.

    vocab_size   the target's, where one of the two is padded: what the target does not have is never drawn, what the
                 drafter does not have has probability 0
    temperature  the drafter's own, for requests that sample; None is the request's. Free: the draft says which it was
    confidence   end a draft behind a token that seemed less likely than this. The token itself is submitted: to drop
                 what was drawn would be a bias
    branches     candidates at a node, for rule="tree": the drawn token, from which the draft goes on, then the
                 likeliest others, chosen
    """

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int | None = None,
        temperature: float | None = None,
        confidence: float = 0.0,
        branches: int = 1,
    ) -> None:
        check_count("branches", branches, 1)
        check_share("confidence", confidence)
        if temperature is not None:
            Sampling(temperature=temperature)  # refuses what is no temperature
        V, R = vocab_size or model.vocab_size, model.vocab_size
        if branches > min(V, R):
            raise ValueError(f"branches={branches}, but drafter and target have only {min(V, R)} tokens in common")
        self._V = V
        self._vocab = Vocab.of(torch.arange(R, device=model.device), V) if R < V else None
        self._temperature, self._confidence, self._branches = temperature, confidence, branches
        self._limit = model.max_length
        self._reader = Reader(model)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], noise: Noise) -> Draft:
        """Up to k[b] tokens, of a tree k[b] slots; see `Drafter`."""
        slots = [self._room(context, most) for context, most in zip(contexts, k, strict=True)]
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), noise.seeds.device, tree=self._branches > 1)
        samplings = [self._sampling(context.sampling) for context in contexts]
        histories = [seen(context, noise.seeds.device) for context in contexts]
        logits = self._reader.catch_up(contexts, [most > 0 for most in slots])
        spine = Spine(self._branches, sent(slots, logits.device))
        draws = Draws(samplings, noise, self._vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                logits = self._reader.step(spine.tokens[-1], [start < most for most in slots])
            # to cut tokens off is to mask them: the law knows no others
            spine.add(*draws(logits[:, : self._V], grown(histories, samplings, spine.tokens), start))
            if self._confidence and spine.end_behind_weak(self._confidence):
                break
        steps = [-(-most // self._branches) - 1 for most in slots]
        self._reader.stepped(spine.rows(), [max(0, min(n, len(spine.tokens) - 1)) for n in steps])
        return spine.draft(shared_noise=noise.shared)

    def _room(self, context: Context, most: int) -> int:
        """As many slots as the model has positions for; none behind an empty text."""
        if not context.tokens:
            return 0
        return most if self._limit is None else max(0, min(most, self._limit - len(context.tokens)))

    def _sampling(self, sampling: Sampling) -> Sampling:
        if self._temperature is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, temperature=self._temperature)
