"""Make decoders of other libraries and programs auditable; a library is imported when its decoder is made."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from draftproof.auditor.interface import Decoder

_MODULE: Final = {
    "transformers_plain": "transformers",
    "transformers_assisted": "transformers",
    "transformers_universal": "transformers",
    "transformers_lookup": "transformers",
    "vllm": "vllm",
    "command": "command",
    "openai": "openai",
}
"""The functions that make a decoder, and the module of each."""

DECODERS: Final = tuple(_MODULE)


def maker(name: str) -> Callable[..., Decoder]:
    """Return the function that makes a decoder of this name: `maker("command")(argv)`."""
    if name not in _MODULE:
        raise ValueError(f"decoder must be one of {', '.join(map(repr, DECODERS))}; got {name!r}")
    made: Any = getattr(import_module(f"draftproof.auditor.decoders.{_MODULE[name]}"), name)
    return made  # type: ignore[no-any-return]
