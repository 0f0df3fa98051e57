"""Constrain requests by llguidance's grammars (extra `grammar`), through the `allowed` argument:

    engine.generate(prompt, allowed=draftproof.llguidance.json_schema({"type": "object", ...}, engine))

The mask is computed at every scored position. So the text matches the grammar under every rule, and has exactly the
distribution of plain decoding with the same masks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from draftproof.engine.engine import Engine

WHITESPACE: Final = r" |\r?\n[ \t]{0,64}"
"""White space between two parts of a JSON text: a space, or a new line with an indentation.

JSON allows any amount of it, and a model that has begun to repeat new lines would never end its text.
"""


def json_schema(schema: str | Mapping[str, Any], engine: Engine) -> "Grammar":
    """Allow JSON texts that match this schema, with white space as in `WHITESPACE`.

    A schema with llguidance's own "x-guidance" says itself which white space there may be.
    """
    read = json.loads(schema) if isinstance(schema, str) else dict(schema)
    return _grammar(_library().LLMatcher.grammar_from_json_schema(with_limited_whitespace(read)), engine)


def with_limited_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose texts have white space as in `WHITESPACE`, unless it says something else itself."""
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}


def regex(pattern: str, engine: Engine) -> "Grammar":
    """Allow texts that match this regular expression as a whole."""
    return _grammar(_library().LLMatcher.grammar_from_regex(pattern), engine)


def lark(grammar: str, engine: Engine) -> "Grammar":
    """Allow texts of this grammar, in llguidance's dialect of Lark."""
    return _grammar(_library().LLMatcher.grammar_from_lark(grammar), engine)


class Grammar:
    """A function from output tokens to the mask of tokens that may follow. Any number of requests may share it.

    The matcher stays at the prefix of the last call. The next call rolls it back to the common prefix and feeds it the
    rest. This state only saves time: the mask depends on the prefix alone.
    """

    def __init__(self, matcher: Any, eos: Collection[int], vocab_size: int) -> None:
        self._matcher, self._eos, self._V = matcher, frozenset(eos), vocab_size
        self._prefix: list[int] = []

    def __call__(self, prefix: Sequence[int]) -> Bool[Tensor, " V"]:
        """Return the mask after these output tokens; all True after the end of the text, where no token is used."""
        if self._eos.intersection(prefix):
            return torch.ones(self._V, dtype=torch.bool)
        self._move_to(list(prefix))
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))[: self._V]
        return torch.nn.functional.pad(mask, (0, self._V - len(mask)))

    def _move_to(self, prefix: list[int]) -> None:
        different = next((i for i, (a, b) in enumerate(zip(self._prefix, prefix, strict=False)) if a != b), None)
        common = min(len(self._prefix), len(prefix)) if different is None else different
        self._matcher.rollback(len(self._prefix) - common)
        self._matcher.consume_tokens(prefix[common:])
        self._check()
        self._prefix = prefix

    def _check(self) -> None:
        """Raise the matcher's error: it does not raise errors itself, and stays in the error state."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n<state>")[0]  # not the state of its parser
            raise ValueError(f"llguidance: {reason}")


def _grammar(grammar: str, engine: Engine) -> Grammar:
    if engine.tokenizer is None or not engine.eos:
        raise ValueError("a grammar needs an engine with a tokenizer, and a token that ends the text")
    compiled = Grammar(_library().LLMatcher(_tokenizer(engine), grammar), engine.eos, engine.model.vocab_size)
    compiled._check()  # an invalid grammar is an error of the new matcher
    return compiled


_tokenizers: WeakKeyDictionary[Engine, Any] = WeakKeyDictionary()
"""llguidance's tokenizer of each engine: making one takes up to a second."""


def _tokenizer(engine: Engine) -> Any:
    from llguidance.hf import from_tokenizer

    made = _tokenizers.get(engine)
    if made is None:
        tokenizer: Any = engine.tokenizer
        tokenizer = getattr(tokenizer, "as_transformers", lambda: tokenizer)()
        made = from_tokenizer(tokenizer, n_vocab=engine.model.vocab_size, eos_token=sorted(engine.eos))
        _tokenizers[engine] = made
    return made


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError('grammars need llguidance: pip install "draftproof[grammar]"') from error
    return llguidance
