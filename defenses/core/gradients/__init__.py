"""Clipped sums of per-example gradients: the executor of step plans, the reference engine, and the checks of models."""
