"""Clipped sums of per-example gradients: the executor of step plans, the reference engine, and the checks of models."""

from .numerics import torch_workarounds  # noqa: F401 - before any model is trained
