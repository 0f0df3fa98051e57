"""Guess with a smaller model: its tokens are drawn, and the draft carries the very law they were drawn from."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core import race
from draftproof.core.law import Law, Vocab
from draftproof.core.noise import Noise
from draftproof.core.sampling import Sampling, warp
from draftproof.core.types import Draft, History
from draftproof.drafters import Context
from draftproof.drafters.guess import Guess, check_count, check_share, chosen
from draftproof.drafters.reader import Reader
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
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        seen = [_seen(context, noise.seeds.device) for context in contexts]
        logits = self._reader.catch_up(contexts, [most > 0 for most in slots])
        spine = Spine(self._branches, torch.tensor(slots, device=logits.device))
        for start in range(0, max(slots), self._branches):
            if start:
                logits = self._reader.step(spine.tokens[-1], [start < most for most in slots])
            law = self._law(logits, samplings, _grown(seen, samplings, spine.tokens))
            spine.add(law, _drawn(law, noise, start, greedy))
            if self._confidence and spine.end_behind_weak(self._confidence):
                break
        steps = [-(-most // self._branches) - 1 for most in slots]
        self._reader.stepped([row[: max(0, min(n, len(row) - 1))] for row, n in zip(spine.rows(), steps, strict=True)])
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

    def _law(self, logits: Float[Tensor, "B R"], samplings: list[Sampling], seen: list[History]) -> Law:
        """What each row's next token is drawn from. To cut tokens off is to mask them: the law knows no others."""
        law = warp(logits[:, None, : self._V], samplings, seen, vocab=self._vocab)
        return law.first


def _drawn(law: Law, noise: Noise, j: int, greedy: bool) -> Int[Tensor, " B"]:
    """A draw from each law. From point masses there is nothing to draw, and no need to write them out first."""
    return law.point if greedy else race.propose(law, noise, j)


def _seen(context: Context, device: torch.device) -> History:
    """What the penalties count, on the device once a round; nothing where there is no penalty."""
    if not context.sampling.penalises:
        return History([], [])
    n = context.prompt_length
    parts = context.tokens[:n], context.tokens[n:]
    return History(*(torch.tensor(list(part), dtype=torch.long, device=device) for part in parts))


def _grown(seen: list[History], samplings: list[Sampling], drafted: list[Tensor]) -> list[History]:
    """The same with the drafted tokens behind it."""
    if not drafted or not any(sampling.penalises for sampling in samplings):
        return seen
    rows = torch.stack(drafted, 1)
    return [
        History(h.prompt, torch.cat([h.output, row])) if isinstance(h.output, Tensor) else h
        for h, row in zip(seen, rows, strict=True)
    ]
