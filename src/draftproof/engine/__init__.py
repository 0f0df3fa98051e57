"""The engine: rows in and out of a batch, round after round. The only place with mutable state."""
