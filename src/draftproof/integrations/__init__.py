"""Use draftproof with other libraries: inside transformers' generate, and with llguidance's grammars."""
