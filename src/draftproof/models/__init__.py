"""Models: tokens and a cache in, logits out."""
