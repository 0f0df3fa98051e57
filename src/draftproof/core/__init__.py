"""Probability: distributions, sampling parameters, random numbers and draws. Knows nothing about models."""
