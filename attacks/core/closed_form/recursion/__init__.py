"""Recursive inversion of a network by linear equations, layer by layer, from the gradient of one example."""
