"""Other people's decoders, each behind one function; a host is imported when its decoder is made."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from draftproof.auditor.interface import Decoder

_HOME: Final = {
    "transformers_plain": "transformers",
    "transformers_assisted": "transformers",
    "transformers_lookup": "transformers",
    "vllm": "vllm",
    "command": "command",
}
"""The functions that make a decoder, and the file of each."""

DECODERS: Final = tuple(_HOME)


def maker(name: str) -> Callable[..., Decoder]:
    """The function of this name: `maker("command")(argv)`."""
    if name not in _HOME:
        raise ValueError(f"decoder must be one of {', '.join(map(repr, DECODERS))}; got {name!r}")
    made: Any = getattr(import_module(f"draftproof.auditor.decoders.{_HOME[name]}"), name)
    return made  # type: ignore[no-any-return]
