"""Per-layer rules: from a recorded call of a layer to per-example gradients of its parameters."""
