"""Measure decoding speed on this machine: drafters and rules against plain decoding, in alternation on every prompt."""
