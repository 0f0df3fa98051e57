"""Grammars by llguidance (the extra `grammar`), as the `allowed` of a request:

    engine.generate(prompt, allowed=draftproof.llguidance.json_schema({"type": "object", ...}, engine))

The mask is asked for at every scored position: a text keeps to the grammar under every rule, and has exactly the
distribution of plain decoding with the same masks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from draftproof.engine.engine import Engine


def json_schema(schema: str | Mapping[str, Any], engine: Engine) -> "Grammar":
    """Texts that are JSON and fit this schema."""
    matcher = _host().LLMatcher
    return _grammar(matcher.grammar_from_json_schema(schema if isinstance(schema, str) else dict(schema)), engine)


def regex(pattern: str, engine: Engine) -> "Grammar":
    """Texts that match this regular expression as a whole."""
    return _grammar(_host().LLMatcher.grammar_from_regex(pattern), engine)


def lark(grammar: str, engine: Engine) -> "Grammar":
    """Texts of this grammar, in llguidance's dialect of Lark."""
    return _grammar(_host().LLMatcher.grammar_from_lark(grammar), engine)


class Grammar:
    """Which tokens may follow an output. May be shared by any number of requests, one after another or together.

    A matcher that follows the text it was asked about last: what that text and the next do not share is taken back,
    and the rest is read. It is memory only; the prefix alone decides the answer.
    """

    def __init__(self, matcher: Any, eos: Collection[int], vocab_size: int) -> None:
        self._matcher, self._eos, self._V = matcher, frozenset(eos), vocab_size
        self._read: list[int] = []

    def __call__(self, prefix: Sequence[int]) -> Bool[Tensor, " V"]:
        """The mask behind these output tokens; behind the end of the text, where nothing is said, everything."""
        if self._eos.intersection(prefix):
            return torch.ones(self._V, dtype=torch.bool)
        self._follow(list(prefix))
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))[: self._V]
        return torch.nn.functional.pad(mask, (0, self._V - len(mask)))

    def _follow(self, prefix: list[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(self._read, prefix, strict=False)) if a != b), None)
        kept = min(len(self._read), len(prefix)) if same is None else same
        self._matcher.rollback(len(self._read) - kept)
        self._matcher.consume_tokens(prefix[kept:])
        self._check()
        self._read = prefix

    def _check(self) -> None:
        """The matcher reports no errors by itself, and never leaves one."""
        if self._matcher.is_error():
            raise ValueError(f"llguidance: {self._matcher.get_error()}")


def _grammar(grammar: str, engine: Engine) -> Grammar:
    from llguidance.hf import from_tokenizer

    if engine.tokenizer is None or not engine.eos:
        raise ValueError("a grammar needs an engine with a tokenizer, and a token that ends the text")
    words = from_tokenizer(engine.tokenizer, n_vocab=engine.model.vocab_size, eos_token=sorted(engine.eos))
    made = Grammar(_host().LLMatcher(words, grammar), engine.eos, engine.model.vocab_size)
    made._check()  # a grammar that is none shows here
    return made


def _host() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError('grammars need llguidance: pip install "draftproof[grammar]"') from error
    return llguidance
