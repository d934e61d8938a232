"""Layers, and the kernels that they use."""
