"""Per-layer rules: from one recorded call of a layer to per-example gradients of its parameters."""
