"""A drafting head (EAGLE-3): its network, its file, and its attachment to a target."""
