"""Drafters: propose tokens that may follow a context. They change decoding speed, never the output's distribution."""
