"""Lossless speculative decoding: exact by construction, proven by enumeration, audited end to end.

The public names, each imported when it is first used: `import draftproof` costs nothing.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from draftproof.audit.certificate import Certificate
    from draftproof.audit.decoder import Decoder, Said, Sample
    from draftproof.core.law import Law, Vocab, overlap, residual, total_variation
    from draftproof.core.noise import Noise, Site
    from draftproof.core.sampling import Sampling, warp
    from draftproof.core.types import PAD, Deviation, Draft, History, Inexact, Round, Verdict
    from draftproof.drafters import Asks, Context, Drafter, Shown
    from draftproof.engine.engine import Engine
    from draftproof.engine.load import load
    from draftproof.engine.request import Chunk, Output, Stats
    from draftproof.verify import RULES, Verifier

__version__: Final = "0.1.0"

_HOME: Final = {
    **dict.fromkeys(("Law", "Vocab", "overlap", "residual", "total_variation"), "core.law"),
    **dict.fromkeys(("Noise", "Site"), "core.noise"),
    **dict.fromkeys(("Sampling", "warp"), "core.sampling"),
    **dict.fromkeys(("PAD", "Deviation", "Draft", "History", "Inexact", "Round", "Verdict"), "core.types"),
    **dict.fromkeys(("RULES", "Verifier"), "verify"),
    **dict.fromkeys(("Asks", "Context", "Drafter", "Shown"), "drafters"),
    **dict.fromkeys(("Chunk", "Output", "Stats"), "engine.request"),
    **dict.fromkeys(("Decoder", "Said", "Sample"), "audit.decoder"),
    **dict.fromkeys(("Certificate",), "audit.certificate"),
    "Engine": "engine.engine",
    "load": "engine.load",
}

_MODULES: Final = {
    "lossy": "verify.lossy",
    "llguidance": "integrations.llguidance",
    "transformers": "integrations.transformers",
}

__all__ = [  # noqa: RUF022  (by layer)
    "Law", "Vocab", "overlap", "residual", "total_variation", "Noise", "Site", "Sampling", "warp",
    "PAD", "Deviation", "Draft", "History", "Inexact", "Round", "Verdict", "RULES", "Verifier", "verify", "lossy",
    "Asks", "Context", "Drafter", "Shown", "Chunk", "Output", "Stats", "Engine", "load", "generate", "transformers",
    "audit", "Certificate", "Decoder", "Said", "Sample",
]  # fmt: skip


@cache
def _bundled_engine() -> "Engine":
    from draftproof.engine.load import load

    return load()


def generate(prompt: Any, sampling: "Sampling | None" = None, **options: Any) -> "Output | list[Output]":
    """Continue a prompt with the bundled model: `Engine.generate` of `load()`, which is made once."""
    return _bundled_engine().generate(prompt, sampling, **options)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"draftproof.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"draftproof.{_MODULES[name]}")
    raise AttributeError(f"module 'draftproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Public(ModuleType):
    """Lets a function have the name of the folder it is the door of.

    The import system binds a folder's module to the package when it is first imported, which would hide the function
    behind the module or not, depending on who imported what. A property is not overwritten.
    """

    @property
    def verify(self) -> Any:
        return import_module("draftproof.verify.entrance").verify

    @verify.setter
    def verify(self, folder: ModuleType) -> None:
        pass

    @property
    def audit(self) -> Any:
        return import_module("draftproof.audit.examine").audit

    @audit.setter
    def audit(self, folder: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Public
