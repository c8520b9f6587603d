"""Scorers: metrics with confidence intervals, from an attack's result and the ground truth."""
