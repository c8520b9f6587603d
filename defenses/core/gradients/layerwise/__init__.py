"""Clipped sums layer by layer, from a single forward and backward pass, mostly without rows."""
