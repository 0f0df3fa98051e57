"""Draft inside vLLM with draftproof's n-gram and suffix drafters, as proposers of the method "custom_class".

vLLM passes rows of tokens without request ids, and moves requests between rows. A request is recognised by its tokens:
the row that it was in, or another one whose text it continues. A wrong guess costs time and nothing else, because what
a drafter proposes never depends on the random numbers that verify it.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.drafters import ngram, suffix
from draftproof.drafters.interface import Drafter, TargetOutputs
from draftproof.integrations.vllm.hooks import RefusedError
from draftproof.integrations.vllm.log import logger
from draftproof.integrations.vllm.settings import settings_of

Ids = npt.NDArray[np.integer[Any]]
PLAIN = SamplingParams()


@dataclass(slots=True)
class RowText:
    """One request as a drafter sees it: a `Context` that follows a row of vLLM's token table."""

    id: int
    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    sampling: SamplingParams = PLAIN
    target_outputs: TargetOutputs | None = None
    _array: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def begins(self, row: Ids) -> bool:
        """Return whether a row continues this text."""
        n = len(self.tokens)
        return n <= len(row) and np.array_equal(self._array[:n], row[:n])

    def follow(self, row: Ids) -> None:
        """Append what the row has more than this text."""
        n = len(self.tokens)
        if len(row) > len(self._array):
            grown = np.empty(2 * len(row), dtype=row.dtype)
            grown[:n] = self._array[:n]
            self._array = grown
        self._array[n : len(row)] = row[n:]
        self.tokens += row[n:].tolist()


def check_verification(vllm_config: Any) -> None:
    """Refuse an engine that asks for the plug-in and did not load it, and warn one that does not ask.

    vLLM loads a custom class by its name, whatever VLLM_PLUGINS says.
    """
    from draftproof.integrations.vllm.startup import CONFIG

    if settings_of(vllm_config) is None:
        logger().warning(
            "draftproof drafts and does not verify: verification is vLLM's own, as there is no setting 'draftproof'"
        )
    elif not CONFIG.installed:
        raise RefusedError(
            "draftproof was asked for and vLLM did not load it as a plug-in: add draftproof to "
            "VLLM_PLUGINS, or unset it"
        )


class Proposer:
    """A proposer that asks one of our drafters, with the interface that vLLM expects of a custom class."""

    def __init__(self, vllm_config: Any, drafter: Drafter) -> None:
        check_verification(vllm_config)
        self._drafter = drafter
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._ids = count()
        self._texts: dict[int, RowText] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the CPU runner calls this of any proposer."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Run nothing: there is no model to warm up."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Propose tokens for each row that sampled some: row i holds num_tokens_no_spec[i] tokens."""
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [i for i, new in enumerate(sampled_token_ids) if new and num_tokens_no_spec[i] + 1 < self._max_length]
        texts = self._recognised({i: token_ids_cpu[i, : num_tokens_no_spec[i]] for i in rows}, sampled_token_ids)
        if not texts:
            return proposed
        room = [min(self._most, self._max_length - 1 - len(text.tokens)) for text in texts]
        unused = torch.zeros(len(texts), dtype=torch.int64)  # nothing is drawn
        draft = self._drafter.propose(texts, room, Philox(unused, unused))
        for i, tokens, length in zip(rows, draft.tokens.tolist(), draft.lengths.tolist(), strict=True):
            proposed[i] = tokens[:length]
        return proposed

    def _recognised(self, rows: dict[int, Ids], sampled: list[list[int]]) -> list[RowText]:
        """Return the text of each row: that of an earlier call which it continues, or a new one."""
        known, self._texts = self._texts, {}
        for i, row in rows.items():
            places = [i, *(j for j in known if j != i)]
            found = next((j for j in places if j in known and known[j].begins(row)), None)
            text = RowText(next(self._ids), len(row) - len(sampled[i])) if found is None else known.pop(found)
            text.follow(row)
            self._texts[i] = text
        return list(self._texts.values())


class NGram(Proposer):
    """Draft by k-gram counts over a request's text: `draftproof.drafters.ngram`."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, ngram.NGram())


class Suffix(Proposer):
    """Draft by the longest suffix that occurred before in a request's text: `draftproof.drafters.suffix`."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, suffix.Suffix())
