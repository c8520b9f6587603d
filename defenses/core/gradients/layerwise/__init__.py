"""Clipped sums layer by layer, from one forward and one backward pass, mostly without rows."""
