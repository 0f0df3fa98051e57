"""Loops that numba compiles for CPUs: attention, products, layers and passes."""
