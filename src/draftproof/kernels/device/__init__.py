"""Triton functions that run on the device; each names its PyTorch reference."""
