"""Probability: laws, sampling, noise. Knows torch, and nothing of models."""
