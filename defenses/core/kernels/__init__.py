"""Kernels compiled for the host processor, for operations in which PyTorch's libraries are far below its speed."""
