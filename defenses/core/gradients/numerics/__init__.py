"""Numerical settings of PyTorch and its libraries under which equal examples have equal gradients."""
