"""A drafting head for any target, trained on what the target itself says."""
