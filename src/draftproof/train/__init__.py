"""Train a drafting head for any target, on text that the target itself generates."""
