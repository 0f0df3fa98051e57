"""Probability: distributions, sampling, noise. Knows torch, and nothing of models."""
