"""What architectures share: blocks, shapes, starts of weights."""
