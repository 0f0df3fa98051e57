"""Verify drafts inside vLLM with draftproof's rules, and draft there with its drafters.

    vllm serve MODEL --speculative-config \\
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "draftproof": {"rule": "block"}}'

An engine that does not name draftproof is stock vLLM. Drafters are custom classes of vLLM's: `"method": "custom_class"`
with `"model": "draftproof.integrations.vllm.Suffix"`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.integrations.vllm.drafters import NGram, Suffix

__all__ = ["NGram", "Suffix", "register"]


def register() -> None:
    """Install the plug-in in this process: the entry point that vLLM calls."""
    from draftproof.integrations.vllm.startup import register as install

    install()


def __getattr__(name: str) -> Any:
    # Not imported above: where a plug-in cannot be imported, vLLM writes so to its log and goes on without it.
    if name not in ("NGram", "Suffix"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from draftproof.integrations.vllm import drafters

    return getattr(drafters, name)
