"""Refuse to start a worker in which the plug-in is not active.

    --worker-extension-cls draftproof.integrations.vllm.required.Required

`VLLM_PLUGINS` without draftproof keeps vLLM from loading any of our code, so nothing of ours can refuse then. A worker
extension is loaded by its name whatever `VLLM_PLUGINS` says, and a worker without this package cannot load it.
"""

from draftproof.integrations.vllm.hooks import RefusedError
from draftproof.integrations.vllm.startup import CONFIG

if not CONFIG.installed:
    raise RefusedError(
        "draftproof is required here and vLLM did not load it as a plug-in: add draftproof to VLLM_PLUGINS, or unset it"
    )


class Required:
    """A worker extension without methods: loading it is the check."""
