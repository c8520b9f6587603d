"""Kernels compiled for the processor at hand, where those of PyTorch's libraries are far from what it can do."""
