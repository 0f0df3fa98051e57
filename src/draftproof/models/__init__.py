"""Language models with one interface: tokens and a cache in, logits out."""
