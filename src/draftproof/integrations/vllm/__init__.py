"""Verify drafts inside vLLM with draftproof's rules, and draft there with its drafters.

    vllm serve MODEL --additional-config '{"draftproof": {"rule": "block"}}' \\
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'

An engine whose `additional_config` does not name draftproof is stock vLLM. Drafters go by vLLM's own door:
`{"method": "custom_class", "model": "draftproof.integrations.vllm.Suffix", "num_speculative_tokens": 8}`.
"""

from draftproof.integrations.vllm.drafters import NGram, Suffix

__all__ = ["NGram", "Suffix", "register"]


def register() -> None:
    """Install the plug-in in this process: the entry point that vLLM calls."""
    from draftproof.integrations.vllm.startup import register as install

    install()
