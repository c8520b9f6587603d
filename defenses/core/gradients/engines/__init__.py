"""Ways to compute per-example gradients, interchangeable up to rounding."""
