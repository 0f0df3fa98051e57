"""Explain every round of a generation: record what the rule decided, and show it on a terminal or as a page."""
