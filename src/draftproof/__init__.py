"""Lossless speculative decoding: exact by construction, proven by enumeration, audited end to end.

The public names. Each is imported when it is first used, so that `import draftproof` loads neither torch nor
transformers; type checkers and editors read the same names with their real signatures below.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    from draftproof.auditor.api import audit
    from draftproof.auditor.certificate import Certificate
    from draftproof.auditor.interface import Decoded, Decoder, Sample
    from draftproof.core.distribution import Distribution, DraftVocab, overlap, residual, total_variation
    from draftproof.core.rng import Philox, Purpose
    from draftproof.core.sampling import SamplingParams, warp
    from draftproof.core.types import PAD, Deviation, Draft, History, InexactError, Round, Verdict
    from draftproof.drafters.interface import Context, Drafter, TargetFeatures, TargetOutputs
    from draftproof.engine.engine import Engine
    from draftproof.engine.load import load
    from draftproof.engine.request import Chunk, Output, Stats, TokenLogprobs
    from draftproof.integrations import llguidance, transformers
    from draftproof.models.tokenizer import OnePrompt
    from draftproof.rules import RULES, Verifier, lossy
    from draftproof.rules.api import verify

__version__: Final = "0.1.0"

__all__ = [  # noqa: RUF022  (in the order in which a user meets them)
    # generate with the bundled model, or with yours
    "generate", "load", "SamplingParams", "Engine", "Output", "Chunk", "Stats", "TokenLogprobs",
    "transformers", "llguidance",
    # verify drafts inside another engine
    "verify", "Verdict", "RULES", "InexactError", "PAD", "History", "warp", "Distribution", "DraftVocab",
    # audit a decoder
    "audit", "Certificate", "Decoder", "Decoded", "Sample", "Round",
    # write a drafter or a rule
    "Drafter", "Context", "Draft", "TargetFeatures", "TargetOutputs", "Philox", "Purpose", "Verifier",
    "residual", "overlap", "total_variation", "lossy", "Deviation",
]  # fmt: skip

_MODULE_OF: Final = {
    **dict.fromkeys(("Distribution", "DraftVocab", "overlap", "residual", "total_variation"), "core.distribution"),
    **dict.fromkeys(("Philox", "Purpose"), "core.rng"),
    **dict.fromkeys(("SamplingParams", "warp"), "core.sampling"),
    **dict.fromkeys(("PAD", "Deviation", "Draft", "History", "InexactError", "Round", "Verdict"), "core.types"),
    **dict.fromkeys(("RULES", "Verifier"), "rules"),
    **dict.fromkeys(("Context", "Drafter", "TargetFeatures", "TargetOutputs"), "drafters.interface"),
    **dict.fromkeys(("Chunk", "Output", "Stats", "TokenLogprobs"), "engine.request"),
    **dict.fromkeys(("Decoded", "Decoder", "Sample"), "auditor.interface"),
    "Certificate": "auditor.certificate",
    "Engine": "engine.engine",
    "audit": "auditor.api",
    "load": "engine.load",
    "verify": "rules.api",
}

_MODULES: Final = {
    "lossy": "rules.lossy",
    "llguidance": "integrations.llguidance",
    "transformers": "integrations.transformers",
}


@cache
def _bundled_engine() -> "Engine":
    from draftproof.engine.load import load

    return load()


@overload
def generate(prompts: "OnePrompt", sampling: "SamplingParams | None" = None, **options: Any) -> "Output": ...


@overload
def generate(
    prompts: "Sequence[OnePrompt]",
    sampling: "SamplingParams | Sequence[SamplingParams] | None" = None,
    **options: Any,
) -> "list[Output]": ...


def generate(prompts: Any, sampling: Any = None, **options: Any) -> Any:
    """Continue a prompt, or a list of prompts, with the bundled model.

    The same as `Engine.generate` of `load()`, whose engine is made once. One prompt gives an `Output`, a list a list.
    """
    return _bundled_engine().generate(prompts, sampling, **options)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"draftproof.{_MODULE_OF[name]}"), name)
    if name in _MODULES:
        return import_module(f"draftproof.{_MODULES[name]}")
    raise AttributeError(f"module 'draftproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
