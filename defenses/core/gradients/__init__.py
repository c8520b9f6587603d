"""Clipped sums of per-example gradients: the executor of plans, the reference, and the checks of models."""
