"""Drafters: a context in, a draft out. They change how fast a text comes, never its distribution."""
