"""Serve an engine over HTTP with OpenAI's interface: `draftproof serve`."""
